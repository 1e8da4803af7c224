"""From prompts to scored samples, through any EngineClient."""
