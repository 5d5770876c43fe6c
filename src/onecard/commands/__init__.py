"""Commands beside `onecard run`: a job's price from sizes (`simulate`) and from a program (`estimate`)."""
