"""What the papers published beside what comes out here: claims, figures, replays, the contest."""
