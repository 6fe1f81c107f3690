"""One function per verb. Functions take typed objects and paths, return objects, and print nothing."""
