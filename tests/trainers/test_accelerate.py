"""What docs/trainers.md says of accelerate."""

import pytest
import torch

import rescale_data as rd

accelerate = pytest.importorskip("accelerate")


def started(folder):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    project = accelerate.utils.ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    accelerator = accelerate.Accelerator(cpu=True, project_config=project)
    loader = rd.DataLoader(range(32), global_batch_size=8)
    accelerator.register_for_checkpointing(loader)
    return accelerator, loader


def test_folders_that_accelerate_names(tmp_path):
    accelerator, loader = started(tmp_path)
    for _ in zip(range(2), loader, strict=False):
        accelerator.save_state()
    accelerator, loader = started(tmp_path)
    accelerator.load_state()
    assert loader.step == 2
    with pytest.raises(ValueError, match=r"Checkpoint directory .*checkpoint_0.* already exists"):
        accelerator.save_state()
    accelerator.project_configuration.iteration = 2  # checkpoint_1 was loaded
    accelerator.save_state()
    assert (tmp_path / "checkpoints" / "checkpoint_2").exists()


def test_prepare_leaves_a_loader_as_it_is(tmp_path):
    accelerator, loader = started(tmp_path)
    _, prepared = accelerator.prepare(torch.nn.Linear(1, 1), loader)
    assert prepared is loader


def test_accumulate_after_another_number_of_micro_batches_a_step(tmp_path):
    """accelerate keeps its count of micro batches, which another accumulation does not divide."""

    def train(micro_batch_size, stop, state):
        accelerator, _ = started(tmp_path)
        accelerator.project_configuration.automatic_checkpoint_naming = False
        accelerator._custom_objects.clear()
        loader = rd.DataLoader(
            range(96), global_batch_size=12, micro_batch_size=micro_batch_size, num_logical_shards=24
        )
        accelerator.gradient_accumulation_steps = loader.gradient_accumulation_steps
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        accelerator.register_for_checkpointing(loader)
        if state is not None:
            accelerator.load_state(str(state))
            accelerator.step = 0
        sizes = [0]
        for batch in loader:
            with accelerator.accumulate(model):
                sizes[-1] += len(batch)
            sizes += [0] * accelerator.sync_gradients
            if loader.step == stop:
                accelerator.save_state(str(tmp_path / str(stop)))
                return sizes
        raise AssertionError

    assert train(4, 3, None) == [12, 12, 12, 0]
    for micro_batch_size in (2, 6):
        assert train(micro_batch_size, 6, tmp_path / "3") == [12, 12, 12, 0]
