"""Models that are float64 throughout."""

from longspan._rulers import AllDouble

__all__ = ["AllDouble"]
