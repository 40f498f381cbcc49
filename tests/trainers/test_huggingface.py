"""Hugging Face's `Trainer`: what it refuses, epochs after a resume, batches for causal models, processes of one dp rank."""

import functools
import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import rescale_data as rd
from rescale_data.integrations.causal_lm import causal_lm_batch
from tests.distributed.ranks import fails, run_ranks

TWO_RANKS = {"dp_rank": 0, "dp_world_size": 2}


def loader_of(**kwargs):
    return rd.DataLoader(range(32), global_batch_size=8, micro_batch_size=4, **kwargs)  # two micro batches a step


def trainer_of(folder, loader, dataset=None, model=None, **arguments):
    module = pytest.importorskip("rescale_data.integrations.huggingface")
    sizes = {"per_device_train_batch_size": 4, **arguments}
    given = module.TrainingArguments(str(folder), use_cpu=True, report_to=[], **sizes)
    return module.DataStateMixin(model or torch.nn.Linear(1, 1), given, train_loader=loader, train_dataset=dataset)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"gradient_accumulation_steps": 4}, "steps=4.*the loader makes a global batch of 2 micro batches a rank"),
        ({"dataloader_num_workers": 3}, r"num_workers=3\), but .* may be 0\. .*rd\.DataLoader\(num_workers="),
        ({"per_device_train_batch_size": 3}, r"batch_size=3\), but .* may be 4\. .*rd\.DataLoader\(micro_batch_size="),
        ({"data_seed": 3}, r"seed=3\), but .* may be None or 0\. .*rd\.DataLoader\(seed="),
        ({"train_sampling_strategy": "sequential"}, r"may be 'random'\. .*rd\.DataLoader\(shuffle="),
        ({"auto_find_batch_size": True}, r"may be False\. .*rd\.DataLoader\(micro_batch_size="),
        ({"accelerator_config": {"split_batches": True}}, "split_batches=True: .* leave split_batches out"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True: .* leave dispatch_batches out"),
        ({"dataset": [1, 2]}, r"a train_dataset= and a train_loader=: give rd\.DataLoader the dataset"),
        ({"loader": [1, 2]}, r"train_loader= is a list: give rd\.DataLoader"),
        ({"loader": TWO_RANKS}, "has 1 data-parallel ranks, but the loader serves its rows to 2"),
    ],
)
def test_what_is_refused(arguments, says, tmp_path):
    loader = arguments.get("loader", {})
    given = {**arguments, "loader": loader_of(**loader) if isinstance(loader, dict) else loader}
    with pytest.raises((ValueError, TypeError), match=says):
        trainer_of(tmp_path, **given)


def test_it_names_the_checkpoints_that_there_are(tmp_path):
    trainer = trainer_of(tmp_path, loader_of())
    assert (trainer.args.gradient_accumulation_steps, trainer.args.ignore_data_skip) == (2, True)
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        trainer.train(resume_from_checkpoint=True)  # and no run from the first row
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(FileNotFoundError, match=r"checkpoint-3 holds no rescale_data\.pt: .*another checkpoint"):
        trainer.train(resume_from_checkpoint=True)
    torch.save(loader_of().state_dict(), tmp_path / "checkpoint-3" / "rescale_data.pt")
    for folder in ("checkpoint-9", ""):
        with pytest.raises(FileNotFoundError, match=r"there is no such folder.* there are \['.*/checkpoint-3'\]"):
            trainer.train(resume_from_checkpoint=str(tmp_path / folder))


ROWS = [{"x": torch.tensor([float(i)])} for i in range(32)]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        return {"loss": self.layer(x).pow(2).mean()}


def is_first_half(row):
    return bool(row["x"] < 16)


def first_half(shard):
    return rd.Filter(rd.Reader(ROWS, shard), is_first_half)


def train(folder, resume, data=ROWS, max_steps=-1):
    given = {"disable_tqdm": True, "save_steps": 1, "logging_steps": 1, "num_train_epochs": 2, "max_steps": max_steps}
    loader = rd.DataLoader(data, global_batch_size=8, micro_batch_size=4, num_logical_shards=8)  # four steps an epoch
    trainer = trainer_of(folder, loader, model=Model(), **given)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_the_epoch_after_a_resume_within_one(tmp_path):
    whole = train(tmp_path, None)
    resumed = train(tmp_path, str(tmp_path / "checkpoint-6"))
    epochs = [[log["epoch"] for log in trainer.state.log_history if "loss" in log] for trainer in (whole, resumed)]
    assert epochs == [[step / 4 for step in range(1, 9)]] * 2
    assert (resumed.state.epoch, resumed.state.global_step) == (2.0, 8)


@pytest.mark.parametrize("step", range(1, 5))
def test_a_resume_in_any_epoch_of_rows_that_only_reading_counts(step, tmp_path):
    """Of a loader without ``len`` the trainer cannot tell in which epoch it stands, or that it stands at the end of one."""
    whole = train(tmp_path, None, first_half, 5)  # two steps an epoch
    resumed = train(tmp_path, str(tmp_path / f"checkpoint-{step}"), first_half, 5)
    logs = [
        [(log["epoch"], log["loss"]) for log in each.state.log_history if "loss" in log] for each in (whole, resumed)
    ]
    assert logs[0] == logs[1]
    assert [epoch for epoch, _ in logs[0]] == [each / 5 for each in range(1, 6)]


DOCUMENTS = [{"tokens": torch.arange(3, 3 + i % 9 + 2)} for i in range(60)]


def pipeline(packer, options, shard):
    reader = rd.Reader(DOCUMENTS, shard, shuffle=False)
    return packer(reader, column="tokens", seq_len=16, eos_id=2, labels=True, **options)


PACKERS = [(rd.TokenPacker, {}), (rd.TokenPacker, {"doc_ids": True}), (rd.WholeDocumentPacker, {})]
SIZES = {"global_batch_size": 4, "num_logical_shards": 4}


@pytest.mark.parametrize(("packer", "options"), PACKERS)
def test_the_loss_of_a_model_that_shifts(packer, options):
    made = functools.partial(pipeline, packer, options)
    ours, theirs = (next(iter(rd.DataLoader(made, **SIZES, **more))) for more in ({}, {"collate_fn": causal_lm_batch}))
    logits = torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(0))
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ours["labels"][:, :-1].flatten())
    assert F.cross_entropy(logits[:, :-1].flatten(0, 1), theirs["labels"][:, 1:].flatten()) == expected
    learned = theirs["labels"] != -100
    assert theirs["labels"][learned].equal(theirs["input_ids"][learned])
    assert theirs["input_ids"].equal(ours["tokens"])
    assert set(theirs) == {"input_ids", "labels", *["position_ids"] * ("doc_ids" in ours)}


def test_positions_begin_anew_in_each_document_and_labels_are_needed():
    sample = {"tokens": torch.arange(5), "labels": torch.arange(5), "doc_ids": torch.tensor([0, 0, 1, 1, 1])}
    for default_device in ("cpu", "meta"):  # of the trainer: the batch stays on the CPU
        with torch.device(default_device):
            batch = causal_lm_batch([sample])
        assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    with pytest.raises(ValueError, match=r"a packer with labels=True, but these have \['tokens'\]"):
        causal_lm_batch([{"tokens": torch.arange(5)}])


def test_it_refuses_labels_that_are_shifted(tmp_path):
    made = functools.partial(pipeline, rd.TokenPacker, {})
    with pytest.raises(ValueError, match=r"would learn the token after the next\. .*collate_fn=causal_lm_batch"):
        trainer_of(tmp_path, rd.DataLoader(made, repeat=True, **SIZES), max_steps=2)
    trainer_of(tmp_path, rd.DataLoader(made, collate_fn=causal_lm_batch, repeat=True, **SIZES), max_steps=2)


def packed():
    source = rd.SyntheticSource(64, length=16)
    return lambda shard: rd.TokenPacker(rd.Reader(source, shard), column="tokens", seq_len=8, eos_id=0, labels=True)


def make(data):
    ranks = {"peers": dist.group.WORLD, "dp_rank": 0, "dp_world_size": 1}
    return rd.DataLoader(data, **ranks, global_batch_size=8, micro_batch_size=4, seed=3, timeout=60.0)


def rows():
    return ROWS


def on_two_peers(folder):
    rank, size = str(dist.get_rank()), str(dist.get_world_size())  # as torchrun tells them to trainers
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # of a group that exists already

    def trainer(data, tp_size, **sizes):
        model = torch.nn.Linear(1, 1)
        model._tp_size = tp_size  # what Trainer reads of a model that is split
        return trainer_of(folder, make(data), model=model, data_seed=3, **sizes)

    fails("has 2 data-parallel ranks, but the loader serves its rows to 1", trainer, rows, 1, kind=ValueError)
    sizes = {"per_device_train_batch_size": 2}
    fails(r"per_device_train_batch_size=2\), but", trainer, rows, 2, **sizes, kind=ValueError)
    fails("labels=True", trainer, packed, 2, kind=ValueError)
    assert trainer(rows, 2).args.gradient_accumulation_steps == 2


def test_a_peer_that_reads_nothing_checks_the_loader_as_the_others_do(tmp_path):
    pytest.importorskip("rescale_data.integrations.huggingface")
    run_ranks(2, on_two_peers, tmp_path)
