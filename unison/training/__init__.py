"""From finished samples to an optimizer step: rows, packing, schedule, batch arithmetic, trainer."""
