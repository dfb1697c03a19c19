//! What a clone's agent is told after a restore. Plain data; knows neither snapshots nor how they are restored.

use serde::{Deserialize, Serialize};

use crate::exec::Environment;
use crate::message::{Share, TmpfsMount};

/// What a restored guest must not share with the others that were restored from the same snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reidentify {
    /// The host's time, in nanoseconds since 1970.
    pub clock_ns: u64,
    /// Random bytes for the guest's generator, at least 32; nobody else may get the same.
    pub entropy: Vec<u8>,
    /// Who the machine is from now on; `None` leaves it who it was, as after a rollback.
    pub identity: Option<Identity>,
    /// How long each of the image's hooks may take, in milliseconds; 0 runs none.
    pub hook_ms: u32,
    /// Let the commands go on at the end.
    pub thaw: bool,
    /// The most processes and threads that all commands may have together from now on; `None` leaves that as it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pids_max: Option<u64>,
    /// The machine was restored while commands may have been running: TCP connections that lead out of it are ended. False for
    /// one that goes on after its own snapshot.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub restored: bool,
    /// File systems in memory that it gets, over the root.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tmpfs: Vec<TmpfsMount>,
    /// Directories that it shares with its host from now on.
    // The word of earlier agents, which snapshots have.
    #[serde(rename = "shares", default, skip_serializing_if = "Vec::is_empty")]
    pub shared_directories: Vec<Share>,
    /// What programs are told in it that ask for its environment, before any of them goes on; `None` leaves that as it was. Agents that do not
    /// know this are told it behind ([`Environment`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment: Option<Environment>,
}

/// Who a machine is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Its host name: letters, digits, dots and hyphens, at most 64.
    pub hostname: String,
    /// What `/etc/machine-id` says: 32 lower-case hexadecimal digits, not all of them zero (machine-id(5)).
    pub machine_id: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::tests::round_trip;
    use crate::message::{Reply, Request};

    #[test]
    fn requests_for_clones_look_as_documented() {
        assert_eq!(round_trip(&Request::Settle), r#""settle""#);
        assert_eq!(round_trip(&Request::Freeze), r#""freeze""#);
        let mut reidentify = Reidentify {
            clock_ns: 1,
            entropy: vec![1, 2],
            identity: Some(Identity {
                hostname: "box".into(),
                machine_id: "00112233445566778899aabbccddeeff".into(),
            }),
            hook_ms: 5000,
            thaw: true,
            ..Reidentify::default()
        };
        assert_eq!(
            round_trip(&Request::Reidentify(Box::new(reidentify.clone()))),
            r#"{"renew":{"clock_ns":1,"entropy":[1,2],"identity":{"hostname":"box","machine_id":"00112233445566778899aabbccddeeff"},"hook_ms":5000,"thaw":true}}"#
        );
        (reidentify.identity, reidentify.pids_max, reidentify.restored) = (None, Some(100), true);
        reidentify.shared_directories = vec![Share {
            tag: "volume0".into(),
            path: "/src".into(),
            read_only: true,
        }];
        reidentify.environment = Some(Environment(vec!["A=b".into()]));
        reidentify.tmpfs = vec![TmpfsMount {
            path: "/run".into(),
            bytes: None,
            mode: 0o755,
            exec: false,
        }];
        let text = round_trip(&Request::Reidentify(Box::new(reidentify)));
        assert!(
            text.contains(r#""identity":null,"#) && text.contains(r#""pids_max":100,"restored":true"#),
            "{text}"
        );
        let mounts = r#""tmpfs":[{"path":"/run","bytes":null,"mode":493,"exec":false}],"shares":[{"tag":"volume0","path":"/src","read_only":true}]"#;
        assert!(text.contains(mounts), "{text}");
        let reidentified = Reply::Reidentified { boot_id: "a-b".into() };
        assert_eq!(round_trip(&reidentified), r#"{"renewed":{"boot_id":"a-b"}}"#);
    }
}
