"""Sweeps: a job and what to try in, every trial's result and the best trial's checkpoint out.

Rank 0 keeps the book of trials (`book.py`) and answers the workers (`desk.py`); each worker trains an array
of fused trials (`array.py`) that it fills from the book (`loop.py`). Workers may form teams (`team.py`) that
train one array each: a leader and those who follow (`led.py`), on shares of every batch or in stages
(`pipelined.py`). What the book holds is in the run's events, and each trial's state in checkpoints of the
ordinary form, so a sweep that was killed goes on.
"""
