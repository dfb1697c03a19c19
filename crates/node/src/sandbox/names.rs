//! Names for sandboxes whose owners gave none: two words that can be said and typed.

const ADJECTIVES: &[&str] = &[
    "amber", "brisk", "calm", "deft", "early", "fleet", "glad", "hardy", "ivory", "jolly", "keen", "lucid", "mild",
    "noble", "olive", "plain", "quiet", "rapid", "solid", "tidy", "umber", "vivid", "warm", "young", "zesty", "bold",
    "crisp", "dense", "fine", "grand", "level", "sharp",
];

const STONES: &[&str] = &[
    "agate",
    "basalt",
    "chert",
    "dolomite",
    "flint",
    "gabbro",
    "granite",
    "gneiss",
    "jasper",
    "lava",
    "marble",
    "marl",
    "mica",
    "obsidian",
    "onyx",
    "opal",
    "pumice",
    "quartz",
    "rhyolite",
    "ruby",
    "sandstone",
    "schist",
    "shale",
    "slate",
    "spinel",
    "talc",
    "topaz",
    "tuff",
    "zircon",
    "beryl",
    "garnet",
    "pyrite",
];

/// A name that is not `taken`; which one follows from the id.
pub(crate) fn make(id: &str, taken: impl Fn(&str) -> bool) -> String {
    let number = u64::from_str_radix(id, 16).unwrap_or(0);
    let pick = |words: &[&'static str], number: u64| {
        let count = u64::try_from(words.len()).unwrap_or(1);
        words
            .get(usize::try_from(number % count).unwrap_or(0))
            .copied()
            .unwrap_or_default()
    };
    let name = format!("{}-{}", pick(ADJECTIVES, number), pick(STONES, number >> 8));
    if taken(&name) {
        return format!("{name}-{}", id.get(..4).unwrap_or(id));
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_names_and_differ() {
        let one = make("0123456789ab", |_| false);
        node_api::check_name(&one).unwrap();
        let two = make("0123456789ab", |name| name == one);
        node_api::check_name(&two).unwrap();
        assert_eq!(two, format!("{one}-0123"));
        for word in ADJECTIVES.iter().chain(STONES) {
            node_api::check_name(word).unwrap();
        }
    }
}
