"""Old import paths of 0.1.0 that the documentation named. New code imports from `tampu`."""
