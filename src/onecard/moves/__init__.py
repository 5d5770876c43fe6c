"""From one layout to another, and from one mesh to another, as steps with bytes and seconds. Pure."""
