"""What a run tells about itself: metrics by registered names, sinks, progress, run folder and plot."""
