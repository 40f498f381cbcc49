"""`Clock`: the counts of samples, steps and epochs of a run, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rescale_data.layout.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The counts of samples, steps and epochs of a run, the same on every rank.

    Args:
        samples: The samples delivered by all ranks, including the ones that filled a last batch.
        origin: The sample count from which steps and micro batches are counted.
        step: The whole global batches delivered before `origin`.
        epoch: Epochs that have ended (``repeat=False``).
        in_step: True if `origin` lies in the middle of a step that other ranks began, and nothing was delivered since.
        dropped_samples, padded_samples: The samples dropped at the ends of epochs, and repeated to fill a last batch.
        skipped: The samples left out (`DataLoader.skip`), as ascending ranges ``(first, stop)``.
    """

    samples: int = 0
    origin: int = 0
    step: int = 0
    epoch: int = 0
    in_step: bool = False
    dropped_samples: int = 0
    padded_samples: int = 0
    skipped: tuple[tuple[int, int], ...] = ()

    def micro_batch(self, layout: Layout) -> int:
        """Return u, the number of the next micro batch of every rank, counted from `origin`."""
        return (self.samples - self.origin) // layout.micro_step_samples

    def global_step(self, global_batch_size: int) -> int:
        """Return the number of whole global batches delivered in the run."""
        return self.step + (self.samples - self.origin) // global_batch_size

    def samples_in_begun_step(self, global_batch_size: int) -> int:
        """Return the number of samples, over all ranks, that were delivered in a step that is not complete."""
        return (self.samples - self.origin) % global_batch_size

    def advanced(self, num_micro_batches: int, layout: Layout) -> Clock:
        samples = self.samples + num_micro_batches * layout.micro_step_samples
        return replace(self, samples=samples, in_step=self.in_step and not num_micro_batches)

    def with_origin_now(self, global_batch_size: int) -> Clock:
        """Return the same counts with `origin` at the current sample, from which steps are counted anew."""
        in_step = self.in_step or self.samples_in_begun_step(global_batch_size) > 0
        return replace(self, origin=self.samples, step=self.global_step(global_batch_size), in_step=in_step)

    def next_epoch(self, global_batch_size: int) -> Clock:
        return replace(self.with_origin_now(global_batch_size), epoch=self.epoch + 1)

    def with_skipped(self, start_sample: int) -> Clock:
        """Return the same counts, with the samples from number ``start_sample`` up to now recorded as skipped."""
        skipped_ranges = self.skipped
        if skipped_ranges and skipped_ranges[-1][1] == start_sample:
            skipped_ranges, start_sample = skipped_ranges[:-1], skipped_ranges[-1][0]
        return replace(self, skipped=(*skipped_ranges, (start_sample, self.samples)))

    def after_load(self, saved_sizes: tuple[int, int, int], layout: Layout) -> Clock:
        """Return the counts after a load: `origin` stays if the order can be kept, else it is the current sample.

        Args:
            saved_sizes: O, W and b of the save.
        """
        current_sizes = (layout.global_batch_size, layout.dp_world_size, layout.micro_batch_size)
        is_at_step_start = not self.samples_in_begun_step(saved_sizes[0]) and saved_sizes[0] == current_sizes[0]
        return self if is_at_step_start or saved_sizes == current_sizes else self.with_origin_now(saved_sizes[0])
