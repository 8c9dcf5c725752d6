"""What backends share that iterate by themselves: the decisions of an iteration in C++, and their structures."""
