"""What other libraries' files say of a job: read, judged, and written."""
