"""The numbers of all channels between two workers, in one enum so that they are unique."""

from __future__ import annotations

from enum import IntEnum


class Tag(IntEnum):
    """The purpose of a message. Edges between stages also use small numbers, in separate channels."""

    # Partial reduce: to the leader of a round, and back.
    ROUND_UP = 1
    ROUND_DOWN = 13
    # Full average: arrivals, then shares of the mean to their owners and back.
    FULL_AVERAGE = 2
    FULL_TO_OWNER = 3
    FULL_FROM_OWNER = 4
    # The mean over a group, likewise.
    GROUP_TO_OWNER = 5
    GROUP_FROM_OWNER = 6
    # Gossip.
    GOSSIP_ASK = 7
    GOSSIP_ANSWER = 8
    # The parameter server.
    PUSH = 9
    PULL = 10
    # From the first of several workers in lockstep to the others, and back.
    DECISION = 1 << 16
    TO_FIRST = (1 << 16) + 1
    # All-reduce over a topology: from here on, two tags for each route of each lane.
    FIRST_ROUTE = 1 << 20
    # Authentication of a process group.
    PROOF = 1 << 24
