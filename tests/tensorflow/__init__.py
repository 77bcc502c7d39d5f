"""Tests of the TensorFlow/Keras backend, on the real framework."""
