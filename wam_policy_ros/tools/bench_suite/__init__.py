"""What ``wam bench`` measures, one file per subject."""
