"""Decentralized training: workers average weights with some of the others, without global steps."""
