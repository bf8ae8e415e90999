"""Training drafters from a target alone: data, features, losses and the trainer."""
