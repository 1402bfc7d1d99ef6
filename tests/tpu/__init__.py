"""Programs compiled for TPUs by the real compiler, recorded for machines without it."""
