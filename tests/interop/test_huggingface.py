"""Hugging Face's Trainer: its arguments both ways, and training through the real one; what it would do silently is shown first."""

import importlib
import itertools
import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from precision import InteropError, PolicyError, PrecisionPolicy, Rule, UnsupportedError
from precision.errors import BackendUnavailableError, MasterWeightsError, PrecisionWarning
from precision.interop import convert, diff, read
from precision.interop.convert import write_text
from precision.names import PRESETS
from precision_torch.accelerate_scaler import AcceleratorScaler
from precision_torch.huggingface_check import effective_policy, require_same
from precision_torch.huggingface_trainer import PrecisionTrainer, PrecisionTrainerMixin
from tests.interop.tiny import flat

MIXED = PRESETS["mixed_float16"]
VOCABULARY = 11


@pytest.fixture(autouse=True)
def fresh_state():
    """Accelerate's state is one for the process."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


@pytest.fixture
def arguments(tmp_path):
    counted = itertools.count()

    def make(**settings):
        usual = {
            "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no",
            "per_device_train_batch_size": 2, "max_steps": 3, "output_dir": str(tmp_path / str(next(counted))),
            "learning_rate": 1e-2,
        }  # fmt: skip
        return TrainingArguments(**{**usual, **settings})

    return make


def gpt2(dtype=torch.float32):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=4, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1, loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel(config).to(dtype)


def bert():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=4, num_labels=2,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def sequences(count=16):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (count, 4), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def classes(count=8):
    generator = torch.Generator().manual_seed(0)
    return [
        {"input_ids": torch.randint(0, VOCABULARY, (3,), generator=generator), "labels": i % 2} for i in range(count)
    ]


def dtypes_of(module):
    seen = set()
    module.register_forward_hook(lambda _, args, out: seen.add(out.dtype))
    return seen


# ---- the arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_training_arguments_take_the_export(preset, arguments, tmp_path):
    export = convert(preset, "huggingface")
    args = arguments(**export.config)
    assert {key: getattr(args, key) for key in export.config} == export.config
    assert args.mixed_precision == {"float16": "fp16", "bfloat16": "bf16"}.get(PRESETS[preset].compute_dtype, "no")
    path = tmp_path / "args.json"
    write_text(export, path)
    with open(path) as file:
        values = {**json.load(file), "output_dir": "out", "use_cpu": True}
    (parsed,) = HfArgumentParser(TrainingArguments).parse_dict(values)
    assert parsed.mixed_precision == args.mixed_precision


def test_all_that_training_arguments_say_reads_back(arguments):
    args = arguments(bf16=True, max_grad_norm=0.5)
    found = read(args.to_dict(), "huggingface")
    assert found.policy == PRESETS["mixed_bfloat16"]
    assert found.rest["max_grad_norm"] == 0.5 and "bf16" not in found.rest
    assert diff("16-mixed", {"fp16": True}) == []


def test_the_loss_scale_is_said_to_be_lost_and_where_it_can_be_had():
    policy = MIXED.with_(
        loss_scale={"mode": "dynamic", "initial": 1024.0}, rules=(Rule(module="head", dtype="float32"),)
    )
    export = convert(policy, "huggingface")
    assert [entry.field for entry in export.lost] == ["rules", "loss_scale.initial"]
    assert all("precision_torch.huggingface_trainer" in entry.instead for entry in export.lost)


@pytest.mark.parametrize(
    ("config", "policy", "note"),
    [
        ({"fp16": True, "half_precision_backend": "auto"}, MIXED, "refuses"),
        ({"fp16": True, "fp16_backend": "apex", "fp16_opt_level": "O3"}, PrecisionPolicy.from_name("O3"), "apex"),
        ({"fp16": True, "no_cuda": True}, PRESETS["float32"], "no_cuda is the old name"),
        ({"fp16": True, "use_cpu": True}, PRESETS["float32"], "on a CPU"),
        ({"bf16": True, "fsdp": "full_shard"}, PRESETS["mixed_bfloat16"].with_(reduce_dtype="bfloat16", output_dtype="bfloat16"), "FSDP"),
        ({"bf16": True, "fsdp": True, "fsdp_config": {"version": 1}}, PRESETS["mixed_bfloat16"].with_(reduce_dtype="bfloat16"), "FSDP"),
        ({"bf16": True, "deepspeed": "ds.json"}, PRESETS["mixed_bfloat16"], "DeepSpeed"),
        ({"bf16": False, "torch_compile": True}, PRESETS["float32"], "switches it on"),
    ],
)  # fmt: skip
def test_what_arguments_mean(config, policy, note):
    found = read(config)
    assert found.policy == policy
    assert note in " ".join(found.notes)


def test_the_base_keeps_its_switches_but_not_what_version_5_refuses(arguments):
    base = {"fp16": True, "fp16_backend": "auto", "tf32": False, "bf16_full_eval": True, "max_grad_norm": 0.0}
    config = convert("bf16", "huggingface", base=base).config
    assert config == {
        "fp16": False, "bf16": True, "tf32": False, "bf16_full_eval": True, "fp16_full_eval": False, "max_grad_norm": 0.0,
    }  # fmt: skip
    assert arguments(**config).bf16_full_eval
    with pytest.raises(TypeError):
        arguments(**base)


@pytest.mark.parametrize("config", [{"fp16": True, "bf16": True}, {"fp16": "yes"}, {"bf16": True, "tf32": 1}])
def test_what_is_not_valid_is_told(config):
    with pytest.raises(InteropError):
        read(config, "huggingface")


# ---- what it would do silently ------------------------------------------------------------------------------------


def test_fp16_on_a_cpu_is_float32_there_and_float16_here(arguments, recwarn):
    model = gpt2()
    seen, before = dtypes_of(model.transformer.h[0].mlp.c_fc), flat(model)
    trainer = Trainer(model, arguments(fp16=True), train_dataset=sequences())
    assert effective_policy(trainer) == PRESETS["float32"]
    with pytest.raises(UnsupportedError, match="compute_dtype would be 'float32', not 'float16'"):
        require_same("fp16", trainer)
    trainer.train()
    assert seen == {torch.float32} and trainer.accelerator.scaler is None
    assert not torch.equal(flat(model), before)
    assert not [w for w in recwarn if "fp16" in str(w.message) or "float16" in str(w.message)]

    model = gpt2()
    seen = dtypes_of(model.transformer.h[0].mlp.c_fc)
    ours = PrecisionTrainer(model, arguments(fp16=True), train_dataset=sequences(), policy="fp16")
    require_same("fp16", ours)
    ours.train()
    assert seen == {torch.float16} and isinstance(ours.accelerator.scaler, AcceleratorScaler)


def test_a_float16_model_on_a_cpu_is_trained_with_no_loss_scaling_there_and_refused_here(arguments):
    model = gpt2(torch.float16)
    seen = dtypes_of(model.transformer.h[0].mlp.c_fc)
    trainer = Trainer(model, arguments(fp16=True, max_steps=1), train_dataset=sequences())
    with pytest.raises(UnsupportedError, match=r"param_dtype would be 'float16', .* loss_scale.mode would be 'none'"):
        require_same("fp16", trainer)
    trainer.train()
    assert seen == {torch.float16} and trainer.accelerator.scaler is None
    ours = PrecisionTrainer(gpt2(torch.float16), arguments(), train_dataset=sequences(), policy="fp16")
    with pytest.raises(MasterWeightsError, match="float16 and have no float32 master weights"):
        ours.train()


def test_a_bfloat16_checkpoint_trains_without_masters_there_and_with_them_here(arguments, tmp_path):
    gpt2(torch.bfloat16).save_pretrained(tmp_path / "model")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    assert model.dtype is torch.bfloat16  # by default, since version 5
    settings = {"learning_rate": 1e-6, "bf16": True}
    trainer = Trainer(model, arguments(**settings), train_dataset=sequences())
    before = flat(model)
    with pytest.raises(UnsupportedError, match="param_dtype would be 'bfloat16', not 'float32'"):
        require_same("bf16", trainer)
    trainer.train()
    large = before.abs() > 0.01
    assert torch.equal(flat(model)[large], before[large])  # smaller than half the spacing: nothing was learnt

    again = GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    with pytest.raises(MasterWeightsError):
        PrecisionTrainer(again, arguments(**settings), train_dataset=sequences(), policy="bf16").train()
    policy = PRESETS["bfloat16"].with_(output_dtype="float32")
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    ours = PrecisionTrainer(again, arguments(**settings), train_dataset=sequences(), policy=policy, master_weights=True)
    ours.train()
    masters = torch.cat([p.detach().flatten() for g in ours.optimizer.param_groups for p in g["params"]])
    assert masters.dtype is torch.float32
    assert not torch.equal(masters, masters.bfloat16().float())  # what the steps add up to is not lost


def test_full_eval_casts_the_model_for_good_there_and_is_refused_here(arguments):
    model = gpt2()
    args = arguments(bf16_full_eval=True)
    Trainer(model, args, train_dataset=sequences(), eval_dataset=sequences(2)).evaluate()
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    with pytest.raises(PolicyError, match="bf16_full_eval casts the model for good"):
        PrecisionTrainer(gpt2(), args, policy="bf16")


# ---- training under the policy ------------------------------------------------------------------------------------


class Overflow(TrainerCallback):
    """Makes the gradients of some steps infinite, and notes the learning rate after every step."""

    def __init__(self, *steps):
        self.steps, self.rates = steps, []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step in self.steps:
            weight = next(model.parameters())
            handle = weight.register_hook(lambda grad: (handle.remove(), grad * float("inf"))[1])

    def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
        self.rates.append(lr_scheduler.get_last_lr()[0])


def test_steps_are_skipped_logged_and_the_schedule_waits(arguments):
    policy = MIXED.with_(
        loss_scale={"mode": "dynamic", "initial": 64.0, "growth_interval": 2}, rules=(Rule(module="lm_head", dtype="float32"),)
    )  # fmt: skip
    model, overflow = gpt2(), Overflow(1)
    model.config.tie_word_embeddings = False
    inside, head = dtypes_of(model.transformer.h[0].mlp.c_fc), dtypes_of(model.lm_head)
    args = arguments(max_steps=4, lr_scheduler_type="linear", learning_rate=1.0, warmup_steps=0)
    trainer = PrecisionTrainer(model, args, train_dataset=sequences(), policy=policy, callbacks=[overflow])
    assert trainer.args.optim == "adamw_torch_fused"
    trainer.train()
    assert (inside, head) == ({torch.float16}, {torch.float32})
    assert overflow.rates == [0.75, 0.75, 0.5, 0.25]
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [(entry["loss_scale"], entry["skipped_steps"]) for entry in logs] == [
        (64.0, 0),
        (32.0, 1),
        (32.0, 1),
        (64.0, 1),
    ]
    assert trainer.state.log_history[-1]["skipped_steps"] == 1


def test_accumulated_gradients_are_clipped_unscaled(arguments):
    def norms(kind, **settings):
        args = arguments(gradient_accumulation_steps=2, max_grad_norm=0.01, max_steps=2, learning_rate=0.0)
        model = gpt2().eval()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        trainer = kind(model, args, train_dataset=sequences(), **settings)
        trainer.train()
        return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]

    policy = MIXED.with_(loss_scale={"mode": "dynamic", "initial": 64.0})
    assert norms(PrecisionTrainer, policy=policy) == pytest.approx(norms(Trainer), rel=2e-2)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "sgd"])
def test_a_run_goes_on_bit_equal_from_a_checkpoint(optim, arguments):
    policy = MIXED.with_(loss_scale={"mode": "dynamic", "initial": 2.0**18, "growth_interval": 2})

    def run(resume=None, **settings):
        args = arguments(max_steps=4, optim=optim, **settings)
        trainer = PrecisionTrainer(gpt2(), args, train_dataset=sequences(), policy=policy, callbacks=[Overflow(3)])
        trainer.train(resume_from_checkpoint=resume)
        return flat(trainer.model), trainer.accelerator.scaler.state_dict(), args.output_dir

    straight, state, folder = run(save_strategy="steps", save_steps=2)
    checkpoint = os.path.join(folder, "checkpoint-2")
    saved = torch.load(os.path.join(checkpoint, "scaler.pt"), weights_only=True)
    assert saved["skipped"] > 0 and saved["version"] == 1 and state["skipped"] > saved["skipped"]
    weights, resumed, _ = run(checkpoint)
    assert torch.equal(weights, straight) and resumed == state
    os.remove(os.path.join(checkpoint, "scaler.pt"))
    with pytest.warns(PrecisionWarning, match="starts at 262144"):
        assert run(checkpoint)[1] != state


def test_bert_trains_and_evaluates_under_bfloat16(arguments):
    class Mine(PrecisionTrainerMixin, Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            kept.append((loss.dtype, outputs.logits.dtype))
            return (loss, outputs) if return_outputs else loss

    kept, model = [], bert()
    inside, norm = dtypes_of(model.bert.encoder.layer[0].output.dense), dtypes_of(model.bert.embeddings.LayerNorm)
    trainer = Mine(model, arguments(max_steps=8), train_dataset=classes(), eval_dataset=classes(), policy="bf16-mixed")
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    assert (inside, norm, set(kept)) == ({torch.bfloat16}, {torch.float32}, {(torch.float32, torch.float32)})
    assert trainer.accelerator.scaler is None and "loss_scale" not in trainer.state.log_history[0]


def test_a_second_train_goes_on_with_the_same_scaler(arguments):
    policy = MIXED.with_(loss_scale={"mode": "dynamic", "initial": 64.0})
    trainer = PrecisionTrainer(gpt2(), arguments(max_steps=2), train_dataset=sequences(), policy=policy)
    trainer.train()
    trainer.train()
    assert trainer.accelerator.scaler.state_dict()["good_steps"] == 4


def test_arguments_that_say_otherwise_are_refused(arguments):
    with pytest.raises(PolicyError, match="TrainingArguments say bf16, but the policy computes in float16"):
        PrecisionTrainer(gpt2(), arguments(bf16=True), policy="fp16")
    with pytest.raises(PolicyError, match="takes a transformers.Trainer"):
        require_same("fp16", gpt2())


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "precision_torch.huggingface_trainer")
    with pytest.raises(BackendUnavailableError, match="pip install"):
        importlib.import_module("precision_torch.huggingface_trainer")
