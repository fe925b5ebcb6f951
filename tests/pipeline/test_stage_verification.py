"""Stages compute what the plain model computes, or the run is refused: checked on the job's own batches."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checked import make_hard, plain_step, prepare, square_loss, staged

import plait
from plait.core.errors import InputError
from plait.core.events import read
from plait.core.run_events import Verified
from plait.launcher.run_dir import RunDir
from plait.pipeline import module_state
from plait.pipeline.cutting.check_model import StageError
from plait.pipeline.verify import verify_stages as verify
from plait.pipeline.verify.in_process import Choices
from plait.pipeline.verify.verify_stages import Example
from plait.planner.schedules.in_flight import Schedule
from plait.profiler import generated_code, recorder, traced_model
from plait.profiler.trace import trace
from plait.schema.settings import ModelSettings, TrainSettings, VerifySettings
from plait.training import checkpoint
from plait.verification import same_random_numbers
from plait.workloads.transformer import transformer
from support.further import but_further
from support.hard_models import TiedByMemory, ViewedBuffer
from support.plans import cut_in_two, planned
from support.stages import cut_all
from support.traced_models import tensors_of
from support.training import digits_job, refused_rank, train_rank
from support.world import run_ranks

tracer = sys.modules["plait.profiler.trace"]
RIGHT = (
    "aliased function",
    "dropped path",
    "auxiliary head",
    "frozen part",
    "own statistics",
    "length",
    "two of one name",
    "zero branch",
    "shared state",
    "divided block",
    "dict",
    "reshaped",
)
REFUSED = {
    "shared buffer": "buffer 'mean' is written by forward and used in stages",
    "state": "Stateful changes self.h, on which its next one depends",
    "counter": "CountsCalls changes self.calls, on which its next one depends",
    "warm-up": "WarmsUp changes self.calls, on which its next one depends",
    "layer drop": "draws random numbers of Python or numpy",
    "branch on size": "would take another branch than in the trace .*hard_models.py",
}


# What computing a stage twice, or its backward in two halves, could change; the others are as one of these.
TWICE = ("dropped path", "own statistics", "zero branch", "shared state", "divided block")
CHOICES = {name: (name, Choices()) for name in RIGHT}
CHOICES |= {f"{name}, twice": (name, Choices(recompute=(0, 1), split=True)) for name in RIGHT}


@pytest.mark.parametrize(
    "case", but_further(CHOICES, *(f"{name}, twice" for name in RIGHT if name not in TWICE))
)
def test_stages_of_a_hard_model_compute_what_it_computes_step_after_step(case: str) -> None:
    name, choices = CHOICES[case]
    model, batches, place = make_hard(name)
    plain = copy.deepcopy(model)
    stages = staged(prepare(model, batches, place, verify=False), choices)
    for step, batch in enumerate([*batches, *batches, batches[0]]):
        expected = plain_step(plain, batch, step)
        stages.drop_gradients()
        torch.manual_seed(step)
        output, _ = stages.step(batch, None)
        torch.testing.assert_close(tensors_of(output), expected, rtol=1e-9, atol=1e-12)
        grads = stages.gradients()
        for parameter, tensor in plain.named_parameters():
            found = grads[parameter]
            assert (found is None) == (tensor.grad is None), parameter
            if found is not None:
                torch.testing.assert_close(found, tensor.grad, rtol=1e-9, atol=1e-12)
    held = {n: b for _, n, b in stages.buffers()}
    for buffer, value in plain.named_buffers():
        torch.testing.assert_close(held[buffer], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["dropped path", "auxiliary head", "frozen part", "own statistics"])
def test_an_evaluation_in_stages_is_that_of_the_model_and_changes_nothing(name: str) -> None:
    model, batches, place = make_hard(name)
    stages = staged(prepare(model, batches, place, verify=False))
    before = [(n, b.clone()) for _, n, b in stages.buffers()]
    with torch.no_grad():
        for inputs in batches:
            with same_random_numbers(1):
                found = stages.evaluate(inputs)
            with same_random_numbers(1):
                expected = copy.deepcopy(model).eval()(*inputs)
            assert type(found) is type(expected)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert all(torch.equal(b, dict(before)[n]) for _, n, b in stages.buffers())


# Dropout is off in evaluation in the stages of sweep/test_sweep_audit.py, too.
@pytest.mark.extended
def test_the_workload_transformer_is_evaluated_without_dropout() -> None:
    torch.manual_seed(0)
    model = transformer(vocabulary=50, context=16, layers=2, heads=2, width=16, dropout=0.5).double()
    batches = tuple((torch.randint(0, 50, (n, 8)),) for n in (4, 3))
    stages = staged(prepare(model, batches, "block2.attention_norm", verify=False))
    with torch.no_grad():
        found = stages.evaluate(batches[0])
        torch.testing.assert_close(found, copy.deepcopy(model).eval()(*batches[0]))


def test_a_module_that_no_cut_divides_is_called_as_the_user_wrote_it() -> None:
    model, batches, _ = make_hard("divided block")
    checked = prepare(model, batches, "last")
    assert checked.stages == (("first", "block"), ("last",))
    stages = staged(checked)
    called: list[Any] = []
    block = stages.modules[0].get_submodule("block")
    assert type(block) is type(model.block)
    block.register_forward_hook(lambda *_: called.append(1))
    stages.step(batches[0], None)
    assert called == [1]
    assert block.h is not None
    names = {n for module in stages.modules for n in module.state_dict()}
    assert names == set(model.state_dict())


@pytest.mark.parametrize(
    ("make", "names"), [(TiedByMemory, "'a.weight' and 'b.weight'"), (ViewedBuffer, "'means' and 'first'")]
)
@pytest.mark.parametrize("verify", [False, True])
def test_tensors_that_share_memory_but_are_not_one_are_refused(make, names, verify) -> None:
    batches = (torch.randn(4, 4),), (torch.randn(3, 4),)
    with pytest.raises(InputError, match=f"{names} share memory but are not one tensor"):
        prepare(make(), batches, "b", verify=verify)
    tied = TiedByMemory()
    tied.b.weight = tied.a.weight
    prepare(tied, batches, "b", verify=verify)


@pytest.mark.parametrize("name", REFUSED)
def test_what_stages_cannot_repeat_is_refused_in_words(name: str) -> None:
    model, batches, place = make_hard(name)
    with pytest.raises(InputError, match=REFUSED[name]):
        prepare(model, batches, place)


def test_a_buffer_that_only_the_plain_model_changes_is_noticed() -> None:
    model, batches, place = make_hard("hidden buffer")
    with pytest.raises(StageError, match="in training mode the buffer count: off by 1"):
        prepare(model, batches, place)


def test_a_buffer_under_two_names_is_compared_once_and_equal() -> None:
    model, batches, place = make_hard("two names")
    plain = copy.deepcopy(model)
    stages = staged(prepare(model, batches, place))
    stages.step(batches[0], None)
    plain_step(plain, batches[0], seed=0)
    held = {name: buffer for _, name, buffer in stages.buffers()}
    twins = [name for name in held if name.endswith("running_mean")]
    assert len(twins) == 1
    torch.testing.assert_close(held[twins[0]], plain.norm.running_mean, rtol=1e-12, atol=1e-12)
    assert held[twins[0]].abs().sum() > 0


@pytest.mark.parametrize("second", [("right_last",), ("right", "right_drop", "right_last")])
def test_branches_that_draw_in_another_order_in_stages_than_in_the_model_are_noticed(
    second: tuple[str, ...],
) -> None:
    """The stages are what a plan may make of branches: not one after the other in the model's order."""
    model, (one, other), _ = make_hard("branches")
    traced = trace(model, one, others=[other])
    ids = [layer.id for layer in traced.layers]
    after = {*second, *ids[ids.index("right_last") + 1 :]}
    stages = ([id for id in ids if id not in after], [id for id in ids if id in after])
    mismatch = verify.find_mismatch(traced, stages, Example([(one, None), (other, None)], square_loss))
    keeps_order = second == ("right_last",)
    assert (mismatch is None) == keeps_order
    assert keeps_order or "right_drop" in str(mismatch)


def test_a_batch_with_other_tensors_than_the_trace_had_is_refused() -> None:
    model, batches, place = make_hard("dict")
    stages = staged(prepare(model, batches, place))
    with pytest.raises(
        InputError, match=r"found tensors at \[0\]\['one'\] .* had \[0\]\['one'\], \[0\]\['two'\]"
    ):
        stages.step(({"one": torch.ones(2, 4)},), None)


def test_numbers_among_the_outputs_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches, place = make_hard("number")
    checked = prepare(model, batches, place)
    assert staged(checked).step(batches[0], None)[0][1] == 3
    model, batches, place = make_hard("counted number")
    with pytest.raises(StageError, match="ReturnsNumber changes self.calls"):
        prepare(model, batches, place)
    without_the_check_of_attributes(monkeypatch)
    with pytest.raises(StageError, match=r"in training mode output\[1\]: off by 1"):
        prepare(model, batches, place)


def test_a_module_with_state_of_its_own_stays_in_one_stage_and_a_note_says_so() -> None:
    model, batches, place = make_hard("divided block")
    checked = prepare(model, batches, place)
    assert checked.stages == (("first",), ("block", "last"))
    assert "forward of block (Stateful) changes self.h" in checked.notes[0]
    assert "stay in one stage" in checked.notes[0]


def test_batches_of_a_length_that_the_trace_has_fixed_are_refused() -> None:
    model, _, _ = make_hard("length")
    x = torch.randn(4, 7, 4, dtype=torch.float64)
    fixed = trace(model, (x,))
    fixed.check_inputs([x[:2]])
    with pytest.raises(InputError, match=r"found size 5 in dimension 1 .* had 7, .*hard_models.py"):
        fixed.check_inputs([x[:, :5]])
    free = trace(model, (x,), others=[(x[:, :6],)])
    free.check_inputs([x[:, :5]])
    ids = [layer.id for layer in free.layers]
    first, last = cut_all(free, [ids[:-1], ids[-1:]])
    torch.testing.assert_close(last.module(*first.module(x[:, :5]))[0], model(x[:, :5]))


def test_sizes_that_were_equal_in_the_trace_must_stay_equal() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(9, 4)

        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return self.embed(source).mean(1) + self.embed(target).sum(1) / target.shape[1]

    tokens = torch.zeros(3, 6, dtype=torch.long)
    found = trace(Two(), (tokens, tokens))
    with pytest.raises(InputError, match="found sizes 6 and 4, which were equal in the trace"):
        found.check_inputs([tokens, tokens[:, :4]])
    free = trace(Two(), (tokens, tokens), others=[(tokens, tokens[:, :4])])
    free.check_inputs([tokens, tokens[:, :4]])


# From Python.


def test_stages_are_verified_from_python_by_a_plan_or_by_where_they_begin() -> None:
    model, (one, other), _ = make_hard("divided block")
    batches = [(one, None), (other, None)]
    checked = plait.verify_stages(model, batches, square_loss, ["last"])
    assert [layers[-1] for layers in checked.fine] == ["block.b", "last"]
    assert checked.notes == ()
    whole = plait.verify_stages(model, batches, square_loss, ["last", "block"])  # a module begins a stage
    assert whole.fine[0] == ("first",)
    assert whole.fine[2] == ("last",)
    checked = plait.verify_stages(model, batches, square_loss, ["block.b"])
    assert checked.fine[0] == ("first",)
    assert "forward of block (Stateful) changes self.h" in checked.notes[0]
    model, (one, other), _ = make_hard("two names")
    batches = [(one, None), (other, None)]
    profile = plait.profile(model, one, lambda output: square_loss(output, None), repeats=1)
    plan = plait.plan(profile, plait.machines(2, 1e9))
    fine = plait.verify_stages(model, batches, square_loss, plan).fine
    assert sorted(id for ids in fine for id in ids) == sorted(node.id for node in profile.graph.nodes)


def test_stages_verified_from_python_are_refused_in_words() -> None:
    model, (one, other), place = make_hard("hidden buffer")
    with pytest.raises(StageError, match="the buffer count: off by 1"):
        plait.verify_stages(model, [(one, None), (other, None)], square_loss, [place])
    with pytest.raises(InputError, match="there is no layer 'c'"):
        plait.verify_stages(model, [(one, None), (other, None)], square_loss, ["c"])
    with pytest.raises(InputError, match="expected two"):
        plait.verify_stages(model, [(one, None)], square_loss, [place])
    with pytest.raises(InputError, match="found the first layer 'a' or one twice"):
        plait.verify_stages(model, [(one, None), (other, None)], square_loss, ["a"])


# Verification alone, without the mend of each case.


def without_the_recorder_of_functions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recorder, "SingleLevelFunction", type("Elsewhere", (), {}))
    patch.setattr(recorder, "refuse_lost_gradient", lambda node, tensor: None)


def trace_without_evaluation(*args: Any, **options: Any) -> traced_model.TracedModel:
    return tracer.trace(*args, **{**options, "evaluation": False})


def without_the_evaluation_trace(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("checked.trace", trace_without_evaluation)


def without_the_check_of_buffers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify, "shared_tensors", lambda traced, stages: {})


def without_the_check_of_attributes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tracer, "changed_state", lambda before, state: [])


def without_the_check_of_draws(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tracer, "python_draws", lambda before: [])


def without_names_of_their_own(patch: pytest.MonkeyPatch) -> None:
    def last_one_wins(objects: dict[str, Any], name: str, item: Any) -> str:
        objects[name] = item
        return name

    patch.setattr(generated_code, "add_object", last_one_wins)


def without_guards(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(traced_model.Guards, "broken_by", lambda self, shapes: None)


def without_copies_of_buffers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module_state, "COPIED_ELEMENTS", -1)


@pytest.mark.parametrize(
    ("name", "revert", "where"),
    [
        ("aliased function", without_the_recorder_of_functions, "gradient of a.weight: none; .* in backward"),
        ("dropped path", without_the_evaluation_trace, "in evaluation mode .*head .* gets other inputs"),
        ("auxiliary head", without_the_evaluation_trace, "in evaluation mode output"),
        ("own statistics", without_the_evaluation_trace, "in evaluation mode .* they first differ"),
        ("shared buffer", without_the_check_of_buffers, "in training mode output"),
        ("state", without_the_check_of_attributes, "code of Stateful before it: b .* gets other inputs"),
        ("counter", without_the_check_of_attributes, "code of CountsCalls before it: b .* gets other"),
        ("layer drop", without_the_check_of_draws, "layers"),
        ("two of one name", without_names_of_their_own, "in training mode"),
        ("branch on size", without_guards, "code of BranchesOnSize before it: b .* gets other inputs"),
        ("zero branch", without_copies_of_buffers, "buffer norm.running"),
    ],
)
def test_verification_alone_catches_a_model_that_would_be_trained_wrong(
    name: str, revert: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    revert(monkeypatch)
    model, batches, place = make_hard(name)
    choices = Choices(recompute=(0,)) if name == "zero branch" else Choices()
    prepare(model, batches, place, choices, verify=False)
    with pytest.raises(StageError, match=f"do not compute what the model computes: .*{where}"):
        prepare(model, batches, place, choices)


def test_a_verification_changes_nothing_of_the_model_nor_of_the_random_numbers() -> None:
    model, batches, place = make_hard("zero branch")
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    prepare(model, batches, place)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


# Runs.


def job(steps: int, verify: str = "first") -> TrainSettings:
    return replace(
        planned((1, 1), Schedule.FLUSH, microbatches=2), steps=steps, verify=VerifySettings(verify)
    )  # type: ignore[arg-type]


def test_a_run_that_would_be_wrong_is_refused_on_every_worker(tmp_path: Path) -> None:
    settings = digits_job(model=ModelSettings("support.hard_models:Digits"), steps=4)
    found = run_ranks(2, refused_rank, cut_in_two(settings, Schedule.FLUSH, 4), tmp_path / "run")
    assert all(
        "forward of Digits changes self.calls, on which its next one depends" in words for words in found
    )


def weights(folder: Path) -> dict[str, Any]:
    return checkpoint.load(checkpoint.list_checkpoints(folder / "checkpoints")[0]).model


def verified(folder: Path) -> list[Verified]:
    return [e.event for e in read(RunDir(folder).events(0)) if isinstance(e.event, Verified)]


def test_a_run_is_verified_once_reports_it_and_ends_bitwise_as_without(tmp_path: Path) -> None:
    first, off = tmp_path / "first", tmp_path / "off"
    result = run_ranks(2, train_rank, job(6), first)[0][0]
    unverified = run_ranks(2, train_rank, job(6, "off"), off)[0][0]
    assert result.verified_s > 0
    assert "verified_s" not in unverified.to_dict()
    assert (len(verified(first)), len(verified(off))) == (1, 0)
    found, expected = weights(first), weights(off)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    run_ranks(2, train_rank, job(8), first, True)
    assert len(verified(first)) == 1
    run_ranks(2, train_rank, job(9, "every_run"), first, True)
    assert len(verified(first)) == 2
