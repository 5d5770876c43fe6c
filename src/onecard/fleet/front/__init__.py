"""Models, optimizers, scalers, pipelines and collectives under Paddle's names."""
