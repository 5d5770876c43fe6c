"""An unchanged program, run without devices as one rank of any world, up to its second optimizer step."""
