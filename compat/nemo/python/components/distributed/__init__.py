"""Mirror of the reference's `components.distributed` package."""
