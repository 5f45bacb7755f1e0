"""How the embedded checkpoint was made: facts, rows, model, training, export, evaluation."""
