"""Measuring a machine: operators, messages, what runs beside them."""
