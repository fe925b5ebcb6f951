"""Sweeps over LoRA adapters of one base: one array for all ranks, each trial as `plait train` makes it."""

from __future__ import annotations

import json

import pytest
import torch

import plait
from plait.core.errors import InputError, JobError
from plait.schema.job import make_job
from plait.sweeping.search.space import parse_dimension
from plait.sweeping.trial_settings import array_key, with_lora_array, with_values

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


def job_of(folder, *changes):
    content = {
        "name": "lora",
        "model": "transformers:LlamaForCausalLM",
        "model_args": {"config": CONFIG},
        "lora": {"r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]},
        "data": {"kind": "text_lines:synthetic_lines", "samples": 16, "length": 6, "vocabulary": 16, "batch_size": 4},
        "loss": "model",
        "optimizer": {"kind": "adamw", "lr": 0.01},
        "precision": "float64",
        "steps": 6,
        "device": "cpu",
        "run_dir": str(folder),
    }  # fmt: skip
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
    assert len(set(keys_of("lora.use_dora=true,false").values())) == 2
    # It computes with whole matrices, which rows of zeros would change.
    assert len(set(keys_of("lora.r=2,4", **{"optimizer": {"kind": "adafactor"}}).values())) == 2
    assert len(set(keys_of("data.kind=text_lines:text_lines,text_lines:synthetic_lines").values())) == 2


@pytest.mark.extended
def test_a_sweep_over_ranks_is_one_array_that_is_refilled_and_its_best_adapter_is_one_of_peft(tmp_path):
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    base.save_pretrained(tmp_path / "base")
    job = job_of(tmp_path, ("model_args", {"path": str(tmp_path / "base")}))
    over = {"lora.r": [1, 4, 8], "optimizer.lr": [0.003, 0.03]}
    found = plait.sweep(job, over, search="asha", width=2, least_steps=2)
    (array,) = found.arrays
    assert array.fused and array.most == 2 and len(array.trials) == 6
    assert {trial.state for trial in found.trials} == {"finished", "dropped"}
    best = found.best
    alone = plait.train(
        job_of(tmp_path, ("model_args", {"path": str(tmp_path / "base")}), *best.values.items())
    )
    assert best.metrics["loss"] == pytest.approx(alone.test["loss"], rel=1e-6)
    logits = []
    for run in (found.run, alone.run):
        config = json.loads((tmp_path / run / "adapter/adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"]) == (best.values["lora.r"], 4)
        loaded = peft.PeftModel.from_pretrained(
            transformers.LlamaForCausalLM.from_pretrained(config["base_model_name_or_path"]), f"{run}/adapter"
        )
        logits.append(loaded.eval()(input_ids=torch.arange(8).view(2, 4)).logits)
    torch.testing.assert_close(logits[0], logits[1])


@pytest.mark.extended
def test_adapters_with_data_of_their_own_train_in_one_array_and_are_all_kept(tmp_path):
    for number, letters in enumerate(("ab", "cd", "ef")):
        lines = [(letters * 4)[: 3 + n % 5] for n in range(10 + number)]
        (tmp_path / f"{number}.txt").write_text("\n".join(lines))
    files = [str(tmp_path / f"{number}.txt") for number in range(3)]
    data = {"kind": "text_lines:text_lines", "length": 6, "level": "byte", "batch_size": 4, "path": files[0]}
    changes = [("data", data), ("model_args", {"config": {**CONFIG, "vocab_size": 256}}), ("steps", 4)]
    found = plait.sweep(job_of(tmp_path, *changes), {"data.path": files})
    (array,) = found.arrays
    assert array.fused and array.most == 3
    for trial in found.trials:
        path = trial.values["data.path"]
        alone = plait.train(job_of(tmp_path, *changes, ("data.path", path)))
        assert trial.metrics["loss"] == pytest.approx(alone.test["loss"], rel=1e-6)
        own, other = (
            peft.utils.load_peft_weights(f"{folder}/adapter", device="cpu")
            for folder in (f"{found.run}/trials/{trial.trial:04d}", alone.run)
        )
        torch.testing.assert_close(own, other)


REFUSED = {
    "rank": ({"r": 17}, JobError, r"lora\.r: found 17, but .*q_proj is 16 x 16; expected at most 16"),
    "layer": ({"target_modules": ["q_prj"]}, JobError, r"no layer 'q_prj'; did you mean 'q_proj'\?"),
    "option": ({"use_dorra": True}, JobError, r"lora\.use_dorra: LoraConfig .* did you mean 'use_dora'"),
    "name": ({"lora_alpha": 3}, JobError, r"it is written lora\.alpha"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_cannot_be_are_refused_in_words(case, tmp_path):
    lora, error, message = REFUSED[case]
    from plait.training.components import build_model

    settings = job_of(tmp_path, ("lora", lora)).settings()
    with pytest.raises(error, match=message):
        build_model(settings.model, 0)


def test_a_folder_without_a_model_is_refused(tmp_path):
    from plait.training.components import build_model

    settings = job_of(tmp_path, ("model_args", {"path": str(tmp_path)})).settings()
    with pytest.raises(InputError, match=r"model_args\.path: found no config\.json in"):
        build_model(settings.model, 0)
