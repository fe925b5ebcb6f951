"""Decentralized training: workers average weights with some of the others, at their own pace."""
