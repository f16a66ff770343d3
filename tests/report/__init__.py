"""What a run of the tests tells: where and how long it ran, what failed, what the engines said."""
