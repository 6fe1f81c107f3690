"""Factor models of feedback: fitted out of core in seconds to minutes, folded in for anybody who has a history."""
