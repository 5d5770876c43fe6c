"""Who does what: degrees, groups, what a rank holds of each parameter, its random states."""
