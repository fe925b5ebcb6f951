"""Sweeps over LoRA adapters of one base: one array for all ranks, each trial as `plait train` makes it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from plait.core.codec import encode
from plait.core.errors import InputError, JobError
from plait.core.files import write_atomic
from plait.fusion import FusionError
from plait.jobs.adapter import save_adapter
from plait.jobs.sweep import go_on, make_sweep
from plait.launcher.run_dir import RunDir
from plait.schema.job import make_job
from plait.schema.settings import UNVERIFIED, SearchSettings
from plait.sweeping.engines.audited_step import AuditedTrial
from plait.sweeping.engines.verified_arrays import first_batches
from plait.sweeping.search.space import parse_dimension
from plait.sweeping.settings import SweepSettings
from plait.sweeping.trial_settings import array_key, with_lora_array, with_values
from plait.sweeping.trials import assigned_trials
from plait.sweeping.trials.trial_files import save_trial
from plait.training import components
from plait.training.fused.fused_components import FusedComponents, stacked
from plait.training.fused.shared_bases import base_held_once
from plait.training.setup import model as models
from plait.training.setup.model import build_model
from plait.training.worker_group import ALONE
from plait.workloads import from_transformers
from plait.workloads.from_transformers import from_config
from support.sweeping import sweep_here
from support.training import train_here

transformers = pytest.importorskip("transformers", reason="needs transformers")
peft = pytest.importorskip("peft", reason="needs peft: pip install 'plait[peft]'")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
CONFIG = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}

OPT = {
    "vocab_size": 16, "hidden_size": 16, "ffn_dim": 16, "word_embed_proj_dim": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2,
}  # fmt: skip


def job_of(folder, *changes):
    content: dict[str, Any] = {
        "name": "lora",
        "model": "transformers:LlamaForCausalLM",
        "model_args": {"config": CONFIG},
        "lora": {"r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]},
        "data": {"kind": "text_lines:synthetic_lines", "batch_size": 4, "samples": 16, "length": 6},
        "loss": "model",
        "optimizer": {"kind": "adamw", "lr": 0.01},
        "precision": "float64",
        "steps": 6,
        "device": "cpu",
        "run_dir": str(folder),
    }  # fmt: skip
    content["data"]["vocabulary"] = CONFIG["vocab_size"]
    return make_job(content, list(changes))


def keys_of(*over, **changes):
    """The keys of arrays of a sweep's trials, by the values of its keys."""
    dimensions = [parse_dimension(text) for text in over]
    settings = with_lora_array(job_of("runs", *changes.items()).settings(), dimensions)
    return {
        value: array_key(with_values(settings, {dimension.key: value}))
        for dimension in dimensions
        for value in dimension.samples()
    }


def test_adapters_of_all_ranks_and_scales_share_an_array_and_others_do_not():
    assert len(set(keys_of("lora.r=2,4,8", "lora.alpha=1,2.5", "lora.dropout=0,0.1").values())) == 1
    assert len(set(keys_of("lora.use_rslora=true,false").values())) == 1
    assert len(set(keys_of("lora.target_modules=q_proj,all-linear").values())) == 1
    assert len(set(keys_of("lora.use_dora=true,false").values())) == 2
    # Its magnitudes train even where an adapter is zeros.
    assert len(set(keys_of("lora.target_modules=q_proj,v_proj", lora={"use_dora": True}).values())) == 2
    # It computes with whole matrices, which rows of zeros would change.
    assert len(set(keys_of("lora.r=2,4", optimizer={"kind": "adafactor"}).values())) == 2
    assert len(set(keys_of("data.kind=text_lines:text_lines,text_lines:synthetic_lines").values())) == 2


def test_one_name_of_layers_stands_for_a_list_of_it():
    adapter = job_of("runs", ("lora.target_modules", "all-linear")).settings().model.adapter
    assert adapter.target_modules == ("all-linear",)


def test_a_search_that_would_drop_adapters_by_losses_of_unlike_data_says_so(caplog):
    make_sweep(job_of("runs"), {"data.seed": [0, 1]}, "asha", 4)
    assert "--search asha compares losses of trials whose data differs" in caplog.text
    caplog.clear()
    make_sweep(job_of("runs"), {"data.seed": [0, 1]})
    make_sweep(job_of("runs"), {"lora.r": [2, 4]}, "asha", 4)
    assert not caplog.records


def test_a_rank_that_is_a_word_is_refused():
    with pytest.raises(InputError, match="lora.r: found 'two', expected a valid integer"):
        make_sweep(job_of("runs"), {"lora.r": ["two", 4]})


def swept(job, folder, *over, **search):
    """What a sweep of the job in this process came to, and what `plait train` makes of a trial's values."""
    dimensions = tuple(parse_dimension(text) for text in over)
    width, resume = search.pop("width", 4), search.pop("resume", False)
    plain = replace(job.settings(), verify=UNVERIFIED)
    train = with_lora_array(plain, dimensions)
    settings = SweepSettings(train, dimensions, SearchSettings(**search), width)
    found = sweep_here(settings, folder / "sweep", resume=resume)

    def alone(values, name="alone"):
        return train_here(with_values(plain, values), folder / name)

    return found, alone


def test_how_many_adapters_an_array_holds_is_measured(tmp_path):
    """On fake tensors, on which what fusion tries out has crashed."""
    found, _ = swept(job_of(tmp_path), tmp_path, "lora.r=2,4,8", width=None)
    assert all("process that measures" not in str(array) for array in found["arrays"])
    assert {trial["state"] for trial in found["trials"]} == {"finished"}


def test_a_sweep_does_not_go_on_with_trials_of_another_base(tmp_path):
    def save_base(seed):
        torch.manual_seed(seed)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).save_pretrained(tmp_path / "base")

    save_base(0)
    job = job_of(tmp_path / "runs", ("model_args", {"path": str(tmp_path / "base")}))
    begun = make_sweep(job, {"lora.r": [2, 4]})
    assert begun.base is not None
    assert go_on(begun) == begun
    save_base(1)
    with pytest.raises(InputError, match="base holds other weights than when the sweep was begun"):
        go_on(begun)
    shutil.rmtree(tmp_path / "base")  # as where only the workers have it
    assert go_on(begun) == begun
    assert make_sweep(job_of("runs"), {"lora.r": [2, 4]}).base is None


def logits_of(base, adapter):
    model = peft.PeftModel.from_pretrained(
        transformers.LlamaForCausalLM.from_pretrained(base), adapter
    ).eval()
    return model(input_ids=torch.arange(8).view(2, 4)).logits


def test_a_sweep_over_ranks_is_one_array_that_is_refilled_and_its_best_adapter_is_one_of_peft(tmp_path):
    base = tmp_path / "base"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).save_pretrained(base)
    job = job_of(tmp_path, ("model_args", {"path": str(base)}))
    over = ("lora.r=1,4,8", "optimizer.lr=0.003,0.03")
    with mock.patch.object(models, "_made", wraps=models._made) as built:
        found, alone = swept(job, tmp_path, *over, kind="asha", width=2, least_steps=2)
    assert built.call_count == 1  # the base, for all trials
    (array,) = found["arrays"]
    assert array["fused"]
    assert array["most"] == 2
    assert len(array["trials"]) == 6
    assert {trial["state"] for trial in found["trials"]} == {"finished", "dropped"}
    best = found["best"]
    result, _ = alone(best["values"])
    assert best["metrics"]["loss"] == pytest.approx(result.test["loss"], rel=1e-6)
    write_atomic(
        tmp_path / "alone/settings.json", json.dumps(encode(with_values(job.settings(), best["values"])))
    )
    logits = []
    for name in ("sweep", "alone"):
        adapter = save_adapter(RunDir(tmp_path / name))
        config = json.loads((adapter / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"]) == (best["values"]["lora.r"], 4)
        assert config["base_model_name_or_path"] == str(base)
        logits.append(logits_of(base, adapter))
    torch.testing.assert_close(logits[0], logits[1])


def test_adapters_of_unlike_layers_train_in_one_array_as_each_does_alone(tmp_path):
    targets = '["v_proj","down_proj"],all-linear,q_proj'
    found, alone = swept(job_of(tmp_path), tmp_path, f"lora.target_modules={targets}")
    (array,) = found["arrays"]
    assert array["fused"]
    for trial in found["trials"]:
        result, _ = alone(trial["values"], f"alone-{trial['trial']}")
        assert trial["metrics"]["loss"] == pytest.approx(result.test["loss"], rel=1e-6)
    adapter = save_adapter(RunDir(tmp_path / "sweep"))
    best = found["best"]["values"]["lora.target_modules"]
    layers = {name.split(".")[-3] for name in peft.utils.load_peft_weights(str(adapter), device="cpu")}
    everything = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert layers == (everything if best == "all-linear" else set(best) if isinstance(best, list) else {best})


def test_trials_of_a_sweep_share_the_memory_of_the_base_and_nothing_that_they_train(tmp_path):
    changes = [{}, {"r": 4}, {"bias": "all"}, {"init_lora_weights": "pissa"}, {}]
    seeds = (0, 0, 0, 0, 1)
    lora = {"r": 2, "target_modules": ["fc1", "q_proj"]}
    model = {"model": "transformers:OPTForCausalLM", "model_args": {"config": OPT}}
    settings = [
        job_of(tmp_path, *model.items(), ("lora", {**lora, **change}), ("seed", seed)).settings()
        for change, seed in zip(changes, seeds)
    ]
    cpu = torch.device("cpu")
    alone = [components.build_without_data(each, cpu) for each in settings]
    with base_held_once():
        together = [components.build_without_data(each, cpu) for each in settings[:4]]
        before = alone[1].state()
        other = replace(before, model={name: tensor + 1 for name, tensor in before.model.items()})
        together[1].load(other)
        together.append(components.build_without_data(settings[4], cpu))
    alone[1].load(other)
    for one, each in zip(together, alone):
        torch.testing.assert_close(one.model.state_dict(), each.model.state_dict(), rtol=0, atol=0)
    memory = [{p.data_ptr(): p.nbytes for p in one.model.parameters()} for one in together]
    frozen = sum(p.nbytes for p in together[0].model.parameters() if not p.requires_grad)
    shared = [sum(one[at] for at in one.keys() & memory[0].keys()) for one in memory[1:]]
    biases = sum(p.nbytes for n, p in together[2].model.named_parameters() if p.requires_grad and "bias" in n)
    assert shared == [0, frozen - biases, 0, 0]


def test_an_audit_does_not_write_to_the_base_of_all_trials(tmp_path):
    settings, cpu = job_of(tmp_path).settings(), torch.device("cpu")
    with base_held_once():
        entries = [components.TrialInit(settings, components.build(settings, cpu)) for _ in range(2)]
        array = FusedComponents(entries)
        before = {name: tensor.clone() for name, tensor in array.fused.shared.items()}
        (batch,), _ = first_batches(entries[:1], (0, 1))
        audited = AuditedTrial.of_array(array, 0, batch, 1.0, ALONE)
        held = {tensor.data_ptr() for tensor in array.fused.shared.values()}
        assert sum(tensor.data_ptr() in held for tensor in audited._before.values()) == len(held)
        plain, perturbed = audited._take(), audited._take(seed=0)
    assert any(not torch.equal(plain[name], perturbed[name]) for name in plain)
    torch.testing.assert_close(array.fused.shared, before, rtol=0, atol=0)


def test_adapters_with_data_of_their_own_train_in_one_array_and_are_all_kept(tmp_path):
    files = [tmp_path / f"{number}.txt" for number in range(3)]
    for number, (file, letters) in enumerate(zip(files, ("ab", "cd", "ef"))):
        file.write_text("\n".join((letters * 4)[: 3 + n % 5] for n in range(10 + number)))
    data = {
        "kind": "text_lines:text_lines",
        "length": 6,
        "level": "byte",
        "batch_size": 4,
        "path": str(files[0]),
    }
    config = {"config": {**CONFIG, "vocab_size": 256}}
    job = job_of(tmp_path, ("data", data), ("model_args", config), ("steps", 4))
    found, alone = swept(job, tmp_path, f"data.path={','.join(map(str, files))}")
    (array,) = found["arrays"]
    assert array["fused"]
    assert array["most"] == 3
    folders = [tmp_path / f"sweep/trials/{trial['trial']:04d}" for trial in found["trials"]]
    with base_held_once(), mock.patch.object(from_transformers, "from_config", autospec=True) as built:
        built.side_effect = from_config
        kept_adapters = [save_adapter(RunDir(folder)) for folder in folders]
    assert built.call_count == 1
    for trial, kept in zip(found["trials"], kept_adapters):
        result, weights = alone(trial["values"], f"alone-{trial['trial']}")
        assert trial["metrics"]["loss"] == pytest.approx(result.test["loss"], rel=1e-6)
        for name, tensor in peft.utils.load_peft_weights(str(kept), device="cpu").items():
            # The model's loss is computed in float32.
            expected = weights[name.replace(".weight", ".default.weight")]
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("width", [1, 4])
def test_a_sample_that_cannot_be_read_fails_the_trial_whose_data_it_is(width, tmp_path):
    data = {"kind": "support.odd_data:Sentences", "user": 0, "batch_size": 4, "shuffle": False}
    job = job_of(tmp_path, ("data", data), ("steps", 4))
    found, alone = swept(job, tmp_path, "data.user=0,1,2", width=width)
    assert [trial["state"] for trial in found["trials"]] == ["finished", "finished", "failed"]
    assert found["trials"][2]["values"] == {"data.user": 1}
    assert "ValueError: a torn sample" in found["trials"][2]["why"]
    for trial in found["trials"][:2]:
        result, _ = alone(trial["values"], f"alone-{trial['trial']}")
        assert trial["metrics"]["loss"] == pytest.approx(result.test["loss"], rel=1e-6)
    with pytest.raises(ValueError, match="a torn sample"):
        swept(job_of(tmp_path, ("data", {**data, "user": 1})), tmp_path / "one", "lora.r=2,4")


UNLIKE = {
    "sizes": (
        {"x": torch.ones(2, 8)},
        {"x": torch.ones(2, 6)},
        r"unlike sizes, such as \[6\] and \[8\]; pad all",
    ),
    "values": ({"x": torch.ones(2), "n": 3}, {"x": torch.ones(2), "n": 4}, r"no tensors \(3 and others\)"),
    "keys": ({"x": torch.ones(2)}, {"y": torch.ones(2)}, "the same keys in all"),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_batches_that_cannot_be_one_are_told_of_and_their_trials_are_not_fused(case):
    first, second, why = UNLIKE[case]
    components: Any = SimpleNamespace(device=torch.device("cpu"), dtype=None)
    with pytest.raises(FusionError, match=why):
        stacked(components, [first, second], 2)
    assert stacked(components, [first, dict(first)], 2)["x"].shape[0] == 2


class Killed(BaseException):
    """Stands for a kill: nothing after it runs."""


def test_a_sweep_does_not_go_on_with_a_file_that_has_changed(tmp_path):
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file in files:
        file.write_text("abcdefg\n" * 40)
    data = {"kind": "text_lines:text_lines", "length": 6, "level": "byte", "batch_size": 4}
    config = {"config": {**CONFIG, "vocab_size": 256}}
    changes = {"data": {**data, "path": str(files[0])}, "model_args": config, "checkpoint.every_steps": 2}
    job, over = job_of(tmp_path, *changes.items()), f"data.path={','.join(map(str, files))}"
    saved = []

    def save(*args):
        if len(saved) == 3:
            raise Killed
        saved.append(save_trial(*args))
        return saved[-1]

    with mock.patch.object(assigned_trials, "save_trial", save), pytest.raises(Killed):
        swept(job, tmp_path, over)
    files[1].write_text("abcdefg\n" * 50)
    with pytest.raises(InputError, match=r"samples: found 45 in .*b\.txt, but the run was trained with 36"):
        swept(job, tmp_path, over, resume=True)
    files[1].write_text("abcdefg\n" * 40)
    found, _ = swept(job, tmp_path, over, resume=True)
    assert {trial["state"] for trial in found["trials"]} == {"finished"}


MORE = {
    "tokens": {"trainable_token_indices": [1, 2]},
    "parameters": {"target_parameters": ["k_proj.weight"]},
    "layers": {"layer_replication": [[0, 1], [0, 1]]},
}


@pytest.mark.parametrize("case", MORE)
def test_what_adapters_train_besides_the_layers_that_are_swept_trains_as_alone(case, tmp_path):
    lora = {"r": 2, "alpha": 4, "target_modules": ["q_proj"], **MORE[case]}
    found, alone = swept(job_of(tmp_path, ("lora", lora)), tmp_path, "lora.target_modules=q_proj,v_proj")
    for trial in found["trials"]:
        result, _ = alone(trial["values"], f"alone-{trial['trial']}")
        assert trial["metrics"]["loss"] == pytest.approx(result.test["loss"], rel=1e-6)
    if case == "tokens":
        assert save_adapter(RunDir(tmp_path / "sweep")) is not None


REFUSED = {
    "rank": ({"r": 17}, JobError, r"lora\.r: found 17, but .*q_proj is 16 x 16; expected at most 16"),
    "layer": ({"target_modules": ["q_prj"]}, JobError, r"no layer 'q_prj'; did you mean 'q_proj'\?"),
    "option": ({"use_dorra": True}, JobError, r"lora\.use_dorra: LoraConfig .* did you mean 'use_dora'"),
    "name": ({"lora_alpha": 3}, JobError, r"it is written lora\.alpha"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_cannot_be_are_refused_in_words(case, tmp_path):
    lora, error, message = REFUSED[case]
    settings = job_of(tmp_path, ("lora", lora)).settings()
    with pytest.raises(error, match=message):
        build_model(settings.model, 0)


def test_a_folder_without_a_model_is_refused(tmp_path):
    settings = job_of(tmp_path, ("model_args", {"path": str(tmp_path)})).settings()
    with pytest.raises(InputError, match=r"model_args\.path: found no config\.json in"):
        build_model(settings.model, 0)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(InputError, match="has a model of type 'gpt2', expected 'llama'"):
        build_model(settings.model, 0)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(
        InputError, match=r"model_args\.path: .*config\.json is no JSON file: Expecting property"
    ):
        build_model(settings.model, 0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).save_pretrained(tmp_path)
    larger = job_of(tmp_path, ("model_args", {"path": str(tmp_path), "config": {"vocab_size": 32}}))
    with pytest.raises(
        InputError, match=r"model_args\.path: transformers cannot load .*in model_args\.config"
    ):
        build_model(larger.settings().model, 0)
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(InputError, match=r"model_args\.path: transformers cannot load the weights in "):
        build_model(settings.model, 0)


def test_a_misspelt_layer_fails_the_trials_that_name_it_and_no_other(tmp_path):
    settings = with_lora_array(
        job_of(tmp_path).settings(), [parse_dimension('lora.target_modules=["q_proj"],["v_prj"]')]
    )
    build_model(with_values(settings, {"lora.target_modules": ["q_proj"]}).model, 0)
    with pytest.raises(JobError, match="no layer 'v_prj'"):
        build_model(with_values(settings, {"lora.target_modules": ["v_prj"]}).model, 0)
