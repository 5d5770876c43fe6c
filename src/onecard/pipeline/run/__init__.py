"""The runtime of pipelines: stages, links, losses."""
