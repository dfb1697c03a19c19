//! What programs of a host ask the gateway's name server. Knows no socket.

use gateway::Zone;

use crate::run::{Target, outcome};

/// A question with one name and no more, and what may be behind it.
fn question(name: &[u8], kind: u8, additional: &[u8]) -> Vec<u8> {
    let records = u8::from(!additional.is_empty());
    let head = [0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, records];
    [&head, name, &[0, kind, 0, 1], additional].concat()
}

/// A message, as it comes by UDP. The answer is always whole, without extensions too, and one to what was asked.
pub(crate) fn questions() -> Target {
    let api = b"\x03api\x02sb\x07example\x00";
    Target {
        name: "gateway-dns",
        seeds: vec![
            question(api, 1, &[]),
            question(api, 28, &[0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0]),
            question(b"\x02sb\x07example\x00", 6, &[]),
            question(b"\x07example\x00", 255, &[0, 0, 41, 4, 208, 0, 1, 0, 0, 0, 0]),
            question(b"\x01a\xc0\x0c", 1, &[]),
        ],
        parse: |bytes| {
            let addresses = vec![[127, 0, 0, 1].into(), std::net::Ipv6Addr::LOCALHOST.into()];
            let domain = "sb.example:8443".parse().ok();
            let Some(zone) = domain.and_then(|domain| Zone::new(&domain, addresses).ok()) else {
                return outcome("no zone");
            };
            match zone.answer(bytes) {
                None => outcome("none"),
                Some(answer) => {
                    assert!(
                        (12..=512).contains(&answer.len()),
                        "an answer of {} bytes",
                        answer.len()
                    );
                    assert_eq!(answer.get(..2), bytes.get(..2), "an answer to another question");
                    // Its code, and how many records of which section there are: an outcome counts no digits.
                    let told = answer.get(3..12).unwrap_or_default();
                    let letters = told.iter().map(|byte| char::from(b'a' + byte % 16));
                    outcome(letters.collect::<String>())
                }
            }
        },
    }
}
