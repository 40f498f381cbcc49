"""Trainers, against the real packages: each row and the output in docs/trainers.md, which lists all arguments."""

import importlib.util
import inspect
import re
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

import rescale_data as rd

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("package", "example"),
    [
        ("lightning", "lightning_trainer.py"),
        ("lightning", "lightning_trainer.py fsdp2"),  # sharded checkpoints
        ("lightning", "fabric_trainer.py"),
        ("transformers", "huggingface_trainer.py"),
        ("trl", "trl_trainer.py"),
        ("torchtitan", "torchtitan_trainer.py"),
        ("torchft", "torchft_trainer.py"),
        ("accelerate", "accelerate_trainer.py"),
        ("ray", "ray_trainer.py"),
        ("deepspeed", "deepspeed_trainer.py"),
    ],
)
def test_every_row_after_a_rescale(package, example):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: see docs/trainers.md")
    script, *arguments = example.split()
    command = [sys.executable, ROOT / "examples" / "trainers" / script, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert run.returncode == 0, run.stdout + run.stderr
    shown = printed(script)
    assert shown[-2:] == ["ok    480 of 480 rows trained: 0 lost, 0 repeated", LAST]
    if script in ("torchft_trainer.py", "ray_trainer.py"):  # which ranks train which step is a matter of time
        shown = [line for line in shown if "steps" not in line]
    assert [line for line in run.stdout.splitlines() if line in shown] == shown


LAST = "ok    20 of 20 global batches are those of one rank that never stopped"


def printed(script):
    """Return the lines that docs/trainers.md says a script prints: the first indented block behind its command."""
    behind = PAGE[PAGE.index(f"python examples/trainers/{script}`") :]
    return re.findall(r"^    (.*)", re.search(r"(?:^    .*\n)+", behind, re.MULTILINE)[0], re.MULTILINE)


PAGE = (ROOT / "docs" / "trainers.md").read_text()
ELSEWHERE = {
    "lightning.pytorch.Trainer": "accelerator precision logger callbacks log_every_n_steps enable_.* gradient_clip_.* "
    "deterministic benchmark inference_mode profiler detect_anomaly barebones plugins sync_batchnorm default_root_dir "
    "model_registry",
    "transformers.TrainingArguments": "output_dir learning_rate lr_.* warmup_.* optim.* weight_decay adam_.* max_grad_norm "
    "label_.* bf16.* fp16.* tf32 .*_checkpointing.* torch_.* .*liger_kernel.* use_cache neftune_.* logging_.* log_.* "
    "disable_tqdm report_to run_name project trackio_.* eval_.* per_device_eval_.* prediction_.* include_for_metrics "
    "batch_eval_metrics save_.* enable_jit_checkpoint push_to_hub hub_.* metric_.* greater_is_better "
    "restore_callback_.* use_cpu ddp_.* fsdp.* deepspeed debug skip_memory_metrics do_.* resume_from_checkpoint local_rank",
    "trl.SFTConfig": "model_init_kwargs trust_remote_code router_.* loss_type activation_offloading",
    "accelerate.Accelerator": "mixed_precision cpu .*deepspeed_.* fsdp_plugin torch_tp_plugin megatron_lm_plugin log_with "
    "project_dir kwargs_handlers dynamo_.* parallelism_config",
    "torchtitan.config.TrainingConfig": "max_norm enable_cpu_offload disable_cuda_graphs dtype mixed_.* gc_.*",
}

ELSEWHERE["trl.SFTConfig"] += " " + ELSEWHERE["transformers.TrainingArguments"]


@pytest.mark.parametrize("trainer", list(ELSEWHERE))
def test_each_argument_is_listed(trainer):
    module, _, name = trainer.rpartition(".")
    pytest.importorskip(module.partition(".")[0])
    found = getattr(import_module(module), name)
    names = [field.name for field in fields(found)] if "Arguments" in name or "Config" in name else None
    names = names or [each for each in inspect.signature(found.__init__).parameters if each != "self"]
    listed = set(re.findall(r"[a-z]\w+", PAGE[PAGE.index("## What the trainer's own arguments do") :]))
    unrelated = re.compile("|".join(ELSEWHERE[trainer].split()))
    assert [each for each in names if each not in listed and not unrelated.fullmatch(each)] == []


def test_torchtitan_saves_whole_steps():
    module = pytest.importorskip("rescale_data.integrations.torchtitan")
    pipeline = lambda *given: rd.Reader(range(96), given[-1])  # noqa: E731
    config = module.RescaleDataLoader.Config(pipeline=pipeline, global_batch_size=8)
    sizes = {"dp_world_size": 1, "dp_rank": 0, "seq_len": 4, "local_batch_size": 4}
    module.RescaleDataLoader(config, snapshot_every_n_steps=4, **sizes)
    says = r"saves every 3 batches, but with global_batch_size=8 the loader takes 2 a step"
    with pytest.raises(ValueError, match=says):
        module.RescaleDataLoader(config, snapshot_every_n_steps=3, **sizes)
