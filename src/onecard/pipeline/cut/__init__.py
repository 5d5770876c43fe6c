"""Stages cut out of a recorded step: of a program that nobody prepared for a pipeline."""
