"""Factor models of feedback: fitted out of core in seconds to minutes, with fold-in for users who have a history."""
