"""Run the training, inference or generation loop that is captured."""
