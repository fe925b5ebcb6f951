"""The experiments of `plait bench --all` as one HTML file: their claims, pictures and tables."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.core.units import count_of, show_bytes, show_cell, show_seconds
from plait.report.outputs.markup import document, table

STYLE = (
    "img { max-width: 100%; height: auto; background: #fff; border-radius: 4px; } "
    "details { margin: .6em 0; } summary { cursor: pointer; } "
    "pre { overflow-x: auto; background: var(--soft); padding: .6em; } "
    ".good { color: var(--backward); } td.good, td.bad { white-space: nowrap; min-width: 0; } "
    "td.words:last-child { min-width: 7em; }"
)
MOST_ROWS = 400
# Beyond this load for each core a machine did more than the experiment.
BUSY = 2


@dataclass(frozen=True)
class ExperimentRun:
    """An experiment that was run: its JSON and its picture, or how it failed; a `waiting` one comes later."""

    name: str
    seconds: float = 0.0
    content: Mapping[str, Any] | None = None
    png: bytes | None = None
    failure: str = ""

    @property
    def state(self) -> str:
        if self.failure:
            return "failed"
        if self.content is None:
            return "waiting"
        broken, unresolved = self._count("does not hold"), self._count("not resolved")
        texts = (
            [f"{count_of(broken, 'claim')} of {len(self.content['claims'])} did not hold"] if broken else []
        )
        texts += [f"{count_of(unresolved, 'claim')} not resolved"] if unresolved else []
        return ", ".join(texts) or "holds"

    @property
    def is_good(self) -> bool:
        """Whether it was run and no claim was found not to hold."""
        return self.content is not None and not self._count("does not hold")

    def _count(self, wanted: str) -> int:
        claims = self.content["claims"] if self.content is not None else ()
        return sum(verdict(claim) == wanted for claim in claims)


def verdict(claim: Mapping[str, Any]) -> str:
    """What an experiment found of a claim: `unresolved` says why it cannot be told."""
    if claim.get("unresolved"):
        return "not resolved"
    return "holds" if claim["holds"] else "does not hold"


def make_bench_page(command: str, runs: Sequence[ExperimentRun]) -> str:
    """The page of experiments, in this order; those that failed say how."""
    return document(
        "Experiments", {"head": _head(command, runs), **{run.name: _section(run) for run in runs}}, STYLE
    )


def _head(command: str, runs: Sequence[ExperimentRun]) -> str:
    failed, waiting = (sum(run.state == state for run in runs) for state in ("failed", "waiting"))
    texts = [count_of(len(runs), "experiment")]
    texts += [f"{failed} failed"] if failed else []
    texts += [f"{waiting} to come"] if waiting else []
    bad = " bad" if failed else ""
    rows = "".join(
        f'<tr><td class="words"><a href="#part-{run.name}">{html.escape(run.name)}</a></td>'
        f'<td class="words"><span class="{_mark(run)}">{html.escape(run.state)}</span></td>'
        f"<td>{show_seconds(run.seconds) if run.seconds else '-'}</td></tr>"
        for run in runs
    )
    return (
        f'<h1>Experiments <span class="state{bad}">{", ".join(texts)}</span></h1>'
        f'<p class="note">{html.escape(command)}: each experiment with its baselines in one run. '
        f"A quick course is short, so its figures are rough; docs/results has the published ones.</p>"
        f"{_setting(runs)}"
        f'<div class="scroll"><table><tr><th class="words">experiment</th><th class="words">claims</th>'
        f"<th>took</th></tr>{rows}</table></div>"
    )


def _mark(run: ExperimentRun) -> str:
    return {"holds": "good", "waiting": ""}.get(run.state, "" if run.is_good else "bad")


def _setting(runs: Sequence[ExperimentRun]) -> str:
    """The machine and the versions of the first experiment that has them: one machine has run all."""
    for run in runs:
        if run.content is not None:
            machine = {key: value for key, value in run.content["machine"].items() if key != "load"}
            if (memory := machine.pop("memory_bytes", None)) is not None:
                machine["memory"] = show_bytes(memory)
            facts = {
                "machine": _listed(machine),
                "versions": _listed(run.content["versions"]),
                "date": run.content["date"],
            }
            lines = [f"<dt>{key}</dt><dd>{html.escape(text)}</dd>" for key, text in facts.items()]
            return f"<dl>{''.join(lines)}</dl>"
    return ""


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items() if value is not None)


def _section(run: ExperimentRun) -> str:
    parts = [f"<h2>{html.escape(run.name)}</h2>"]
    if run.failure:
        parts.append('<p class="bad">It failed:</p>')
        parts.append(f"<pre>{html.escape(run.failure)}</pre>")
    if run.state == "waiting":
        parts.append('<p class="note">Not run yet.</p>')
    if run.content is None:
        return "".join(parts)
    load, cores = (run.content["machine"].get(key) or 0 for key in ("load", "cores"))
    busy = (
        f" on {count_of(cores, 'core')}: what others ran made its times longer" if load > BUSY * cores else ""
    )
    of_run = f"{run.content['command']}, seed {run.content['seed']}, {show_seconds(run.seconds)}"
    parts.append(f'<p class="note">{html.escape(of_run)}, load of the machine {load}{busy}</p>')
    claims = "".join(map(_claim, run.content["claims"]))
    head = "".join(f'<th class="words">{name}</th>' for name in ("", "claim", "found", "goal"))
    parts.append(f'<div class="scroll"><table><tr>{head}</tr>{claims}</table></div>')
    if run.png is not None:
        content = base64.b64encode(run.png).decode()
        label = html.escape(f"the picture of {run.name}")
        parts.append(f'<figure class=wide><img alt="{label}" src="data:image/png;base64,{content}"></figure>')
    parts.append(_rows(run.content["rows"]))
    return "".join(parts)


def _claim(claim: Mapping[str, Any]) -> str:
    found = verdict(claim)
    colour = {"holds": " good", "does not hold": " bad"}.get(found, "")
    goal = "; ".join(part for part in (claim["goal"], claim.get("unresolved")) if part)
    return (
        f'<tr><td class="words{colour}">{found}</td><td class="words">{html.escape(claim["claim"])}</td>'
        f'<td>{show_cell(claim["value"])}</td><td class="words">{html.escape(goal)}</td></tr>'
    )


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """All measured rows, folded away."""
    if not rows:
        return ""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [[show_cell(row.get(column)) for column in columns] for row in rows[:MOST_ROWS]]
    words = tuple(
        number
        for number, column in enumerate(columns)
        if any(isinstance(row.get(column), str) for row in rows)
    )
    more = f"<p class=note>and {len(rows) - MOST_ROWS} more</p>" if len(rows) > MOST_ROWS else ""
    body = f"{table(columns, cells, words)}{more}"
    return f"<details><summary>{count_of(len(rows), 'row')}</summary>{body}</details>"
