"""What this machine can do, and what is slow or broken on it: facts are looked up (`facts`, `network`), then judged (`judge`)."""
