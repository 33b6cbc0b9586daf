"""Mirror of the reference's `components` package."""
