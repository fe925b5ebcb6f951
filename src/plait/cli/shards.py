"""`plait shards`: pre-training data for BERT from plain text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from plait.cli.os_errors import os_errors_as_messages
from plait.cli.runs import JsonFlag
from plait.core.errors import InputError


def shards(
    texts: Annotated[
        list[Path],
        typer.Argument(
            help="Text files: a sentence a line, an empty line between documents.", show_default=False
        ),
    ],
    to: Annotated[Path, typer.Option(help="The folder to write.", show_default=False)],
    vocabulary: Annotated[
        str,
        typer.Option(
            help="How many word pieces to build from the texts, or a file that has them (vocab.txt)."
        ),
    ] = "8000",
    length: Annotated[int, typer.Option(help="Tokens of a sample.")] = 128,
    masked: Annotated[int, typer.Option(help="Most masked tokens of a sample.")] = 20,
    count: Annotated[int, typer.Option("--shards", help="Files to write for training.")] = 8,
    test_fraction: Annotated[float, typer.Option(help="Share of the samples to test with.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Of what is masked and which sentences are paired.")] = 0,
    json_: JsonFlag = False,
) -> None:
    """Make hdf5 shards to pre-train BERT on, and a vocabulary of word pieces, from plain text.

    Example: plait shards corpus.txt --to data/shards --vocabulary 4000 --length 128
    """
    from plait.workloads.bert.make_shards import ShardSettings, make_shards

    with os_errors_as_messages():
        settings = ShardSettings(length, masked, count, test_fraction, seed)
        found = make_shards(texts, to, _vocabulary(vocabulary), settings)
    if json_:
        print(json.dumps({"folder": str(to), **found}))
        return
    print(
        f"{found['training']:,} samples to train with and {found['test']:,} to test with, "
        f"{found['vocabulary']:,} word pieces"
    )
    print(
        f"wrote {to}; next: plait train examples/bert-pretraining.yaml --set data.path={to} "
        f"--set model_args.vocabulary={found['vocabulary']}"
    )


def _vocabulary(given: str) -> int | Path:
    if not given.isdecimal():
        return Path(given)
    if len(given) > 7:
        raise InputError(f"--vocabulary: found {given}, expected at most 9,999,999 pieces, or a file")
    return int(given)
