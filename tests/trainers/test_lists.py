"""Each argument of a trainer stands in docs/trainers.md, or has nothing to do with the data."""

import inspect
import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
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
def test_each_argument_is_listed(trainer: str) -> None:
    module, _, name = trainer.rpartition(".")
    pytest.importorskip(module.partition(".")[0])
    found = getattr(import_module(module), name)
    names = [field.name for field in fields(found)] if "Arguments" in name or "Config" in name else None
    names = names or [each for each in inspect.signature(found.__init__).parameters if each != "self"]
    listed = set(re.findall(r"[a-z]\w+", PAGE[PAGE.index("## What the trainer's own arguments do") :]))
    unrelated = re.compile("|".join(ELSEWHERE[trainer].split()))
    assert [each for each in names if each not in listed and not unrelated.fullmatch(each)] == []
