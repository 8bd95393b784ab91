"""Measured step times: published tables, profiles and operator data."""
