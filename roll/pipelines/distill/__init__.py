"""The distillation pipeline: a student learns a teacher's distributions on given responses."""
