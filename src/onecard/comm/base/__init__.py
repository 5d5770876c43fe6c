"""What every message needs: the state of this process, the attempt's store, who watches."""
