"""Where metrics go beside the run folder: TensorBoard, W&B, Trackio, MLflow, or the user's own."""
