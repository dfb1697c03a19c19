//! `basalt snapshot verify` and `basalt template verify`: asks the daemon and shows what it has found. Reads no file itself.

use anyhow::{Result, bail};
use base::ByteSize;
use node_api::message::Item;
use node_api::transfer::Kind;
use node_api::{Client, Reply, Request, Verified};

use crate::EXIT_FAILED;
use crate::bar::Bar;
use crate::output::Output;

/// Verifies each of these; fails where one is damaged, or cannot be verified, after all were looked at.
pub(crate) fn verify(client: &mut Client, kind: Kind, names: &[String], output: &Output) -> Result<u8> {
    let mut all = Vec::new();
    let mut failed = false;
    for name in names {
        match ask(client, kind, name, output) {
            Ok(verified) => {
                failed |= !verified.damage.is_empty();
                if !output.json() {
                    output.line(&verified, || text(&verified))?;
                }
                all.push(verified);
            }
            Err(error) => {
                failed = true;
                output.error(&error.context(format!("the {kind} `{name}` cannot be verified")));
            }
        }
    }
    if output.json() {
        output.result(&all, String::new)?;
    }
    Ok(if failed { EXIT_FAILED } else { 0 })
}

fn ask(client: &mut Client, kind: Kind, name: &str, output: &Output) -> Result<Verified> {
    let mut bar = Bar::new(output);
    let what = format!("{kind} {name}");
    let request = Request::Verify {
        kind,
        name: name.to_owned(),
    };
    let answer = client.ask_each(request, &mut |item| {
        if let Item::Progress(progress) = item {
            bar.show(&what, progress.done, progress.total);
        }
    })?;
    match answer {
        (Reply::Verified(verified), _) => Ok(*verified),
        (other, _) => bail!("the daemon answered {other:?}: use basalt and basaltd of one build"),
    }
}

fn text(verified: &Verified) -> String {
    let Verified { name, damage, more, .. } = verified;
    let mut lines = Vec::new();
    lines.push(match damage.is_empty() {
        true => format!("{name}: ok, {} in {} ms", ByteSize(verified.bytes), verified.ms),
        false => format!("{name}: damaged"),
    });
    lines.extend(damage.iter().map(|damage| format!("  {damage}")));
    if *more > 0 {
        lines.push(format!("  and {more} parts more"));
    }
    if !verified.summed.is_empty() {
        lines.push(format!(
            "  {} had no checksums, and has some now, of what is in it",
            verified.summed.join(", ")
        ));
    }
    lines.extend(verified.advice.iter().map(|advice| format!("  -> {advice}")));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use node_api::Damage;

    use super::*;

    #[test]
    fn damage_has_a_line_for_each_part_and_one_for_what_to_do() {
        let mut verified = Verified {
            kind: Kind::Snapshot,
            name: "web".into(),
            bytes: 3 << 20,
            ms: 2,
            cpu_ms: 1,
            summed: vec!["disk".into()],
            damage: Vec::new(),
            more: 0,
            advice: None,
        };
        assert_eq!(
            text(&verified),
            "web: ok, 3 MiB in 2 ms\n  disk had no checksums, and has some now, of what is in it"
        );
        verified.summed.clear();
        (verified.damage, verified.more) = (vec![Damage::changed("disk", 0, 65536)], 3);
        verified.advice = Some("mend it".into());
        assert_eq!(
            text(&verified),
            "web: damaged\n  disk: 64 KiB from offset 0 have changed\n  and 3 parts more\n  -> mend it"
        );
    }
}
