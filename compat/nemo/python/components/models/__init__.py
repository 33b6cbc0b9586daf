"""Mirror of the reference's `components.models` package."""
