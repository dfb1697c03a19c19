//! The host's devices in the database: what was asked, how each was before it was bound, and how far it is; each is one JSON document, as
//! sandboxes are. Nothing here knows what the states mean.

use base::PciAddress;
use node_api::BindTerms;
use rusqlite::{Connection, params};
use serde::{Deserialize, Serialize};
use vfio::host::binding::BindingRecord;
use vfio::host::vfs::VfRecord;

use crate::Error;
use crate::store::database::{Database, read_table};

/// Daemons that do not know these tables leave them alone.
pub(super) const SCHEMA: &str = "\
CREATE TABLE IF NOT EXISTS devices (address TEXT PRIMARY KEY, stored TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS vf_changes (address TEXT PRIMARY KEY, stored TEXT NOT NULL) STRICT, WITHOUT ROWID;";

/// A device that is, or was to be, sandboxes'.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredDevice {
    /// On which terms it was bound.
    pub(crate) terms: BindTerms,
    /// The boot of the host that the rest is true of: sysfs forgets everything with the next.
    pub(crate) boot: String,
    /// How it was before.
    pub(crate) record: BindingRecord,
    /// How far it is.
    pub(crate) stage: Stage,
}

impl StoredDevice {
    /// Where it is.
    pub(crate) fn address(&self) -> PciAddress {
        self.record.address
    }
}

/// How far a device is; `resources::devices` draws the ways between them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Stage {
    /// On its way from the host: nobody was told that it has come.
    Binding,
    /// Sandboxes can have it.
    Ready,
    /// A sandbox has it.
    Claimed {
        /// Its id.
        sandbox: String,
        /// It was asked for, and does not only belong to the group of one that was.
        asked: bool,
    },
    /// A sandbox had it.
    Resetting,
    /// A sandbox had it, and it could not be reset.
    Quarantined {
        /// Why not.
        why: String,
    },
    /// It is to be bound at each boot, and could not be at this one.
    Waiting {
        /// Why not.
        why: String,
    },
    /// On its way to the host.
    Unbinding,
}

/// The virtual functions of a physical one are being changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VfChange {
    pub(crate) boot: String,
    /// How they were before.
    pub(crate) record: VfRecord,
}

/// All that the database has of devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StoredDevices {
    pub(crate) devices: Vec<StoredDevice>,
    pub(crate) changes: Vec<VfChange>,
}

impl Database {
    /// Keeps devices as they are now, all of them or none.
    pub(super) fn put_devices(&self, devices: &[StoredDevice]) -> Result<(), Error> {
        let transaction = self
            .connection
            .unchecked_transaction()
            .map_err(Error::database("writing to"))?;
        for device in devices {
            put(
                &transaction,
                "INSERT INTO devices VALUES (?1, ?2) ON CONFLICT (address) DO UPDATE SET stored = ?2",
                device.address(),
                device,
            )?;
        }
        transaction.commit().map_err(Error::database("writing to"))
    }

    pub(super) fn forget_device(&self, address: PciAddress) -> Result<(), Error> {
        self.connection
            .execute("DELETE FROM devices WHERE address = ?1", [address.to_string()])
            .map_err(Error::database("writing to"))?;
        Ok(())
    }

    pub(super) fn put_vf_change(&self, change: &VfChange) -> Result<(), Error> {
        put(
            &self.connection,
            "INSERT INTO vf_changes VALUES (?1, ?2) ON CONFLICT (address) DO UPDATE SET stored = ?2",
            change.record.physical,
            change,
        )
    }

    pub(super) fn forget_vf_change(&self, physical: PciAddress) -> Result<(), Error> {
        self.connection
            .execute("DELETE FROM vf_changes WHERE address = ?1", [physical.to_string()])
            .map_err(Error::database("writing to"))?;
        Ok(())
    }

    /// Takes over what another database had.
    pub(super) fn put_stored(&self, kept: &StoredDevices) -> Result<(), Error> {
        self.put_devices(&kept.devices)?;
        kept.changes.iter().try_for_each(|change| self.put_vf_change(change))
    }
}

fn put(connection: &Connection, statement: &str, address: PciAddress, row: &impl Serialize) -> Result<(), Error> {
    let text = serde_json::to_string(row).map_err(|error| Error::DatabaseDamaged(error.to_string()))?;
    let mut statement = connection
        .prepare_cached(statement)
        .map_err(Error::database("writing to"))?;
    statement
        .execute(params![address.to_string(), text])
        .map_err(Error::database("writing to"))?;
    Ok(())
}

/// Reads all that can be read; then tells of the first row that is none.
pub(super) fn read(connection: &Connection, kept: &mut StoredDevices) -> Result<(), Error> {
    let device = |device: &StoredDevice| device.address().to_string();
    let devices = "SELECT address, stored FROM devices";
    let devices = read_table(connection, devices, ("the device", device), &mut kept.devices);
    let change = |change: &VfChange| change.record.physical.to_string();
    let changes = "SELECT address, stored FROM vf_changes";
    devices.and(read_table(
        connection,
        changes,
        ("the device", change),
        &mut kept.changes,
    ))
}

#[cfg(test)]
mod tests {
    use vfio::host::binding::Original;

    use super::*;
    use crate::store::database::{Contents, Opened};

    fn device(address: &str, stage: Stage) -> StoredDevice {
        StoredDevice {
            terms: BindTerms::default(),
            boot: "a-boot".into(),
            record: BindingRecord {
                address: address.parse().unwrap(),
                driver: Original::Driver("nvme".into()),
                driver_override: None,
            },
            stage,
        }
    }

    fn reopened(path: &std::path::Path) -> Contents {
        Database::open(path).unwrap()
    }

    #[test]
    fn devices_are_kept_changed_and_forgotten() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("node.db");
        let database = reopened(&path).database;
        let sandbox = "aaaaaaaaaaaa".to_owned();
        let (one, mut two) = (
            device("0000:01:00.0", Stage::Ready),
            device("0000:02:00.0", Stage::Claimed { sandbox, asked: true }),
        );
        database.put_devices(&[one.clone(), two.clone()]).unwrap();
        two.stage = Stage::Quarantined { why: "it hangs".into() };
        database.put_devices(std::slice::from_ref(&two)).unwrap();
        let change = VfChange {
            boot: "a-boot".into(),
            record: VfRecord {
                physical: two.address(),
                count: 2,
                autoprobe: true,
            },
        };
        database.put_vf_change(&change).unwrap();
        database.forget_device(one.address()).unwrap();
        database.forget_device(one.address()).unwrap();
        drop(database);
        let contents = reopened(&path);
        assert_eq!(
            (contents.devices.devices, contents.devices.changes),
            (vec![two], vec![change.clone()])
        );
        contents.database.forget_vf_change(change.record.physical).unwrap();
        drop(contents.database);
        assert!(reopened(&path).devices.changes.is_empty());
    }

    #[test]
    fn what_can_be_read_of_a_damaged_one_is_taken_over_and_one_of_before_has_none() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("node.db");
        let database = reopened(&path).database;
        let one = device("0000:01:00.0", Stage::Ready);
        database.put_devices(std::slice::from_ref(&one)).unwrap();
        // One that is none, and one of another device.
        let other = serde_json::to_string(&device("0000:03:00.0", Stage::Ready)).unwrap();
        for (copy, spoiled) in ["{}", &other].into_iter().enumerate() {
            let path = directory.path().join(format!("{copy}.db"));
            let database = reopened(&path).database;
            database.put_devices(std::slice::from_ref(&one)).unwrap();
            let spoil = "INSERT INTO devices VALUES ('0000:02:00.0', ?1)";
            database.connection.execute(spoil, [spoiled]).unwrap();
            drop(database);
            let contents = reopened(&path);
            assert!(
                matches!(contents.opened, Opened::SetAside { .. }),
                "{:?}",
                contents.opened
            );
            assert_eq!(contents.devices.devices, std::slice::from_ref(&one));
        }
        drop(database);
        let contents = reopened(&path);
        // Whoever opens it anew writes it again; an earlier daemon had no such table.
        contents.database.put_stored(&contents.devices).unwrap();
        drop(contents.database);
        let contents = reopened(&path);
        assert_eq!((contents.opened, contents.devices.devices.len()), (Opened::Whole, 1));
        let drop_tables = "DROP TABLE devices; DROP TABLE vf_changes";
        contents.database.connection.execute_batch(drop_tables).unwrap();
        drop(contents.database);
        let contents = reopened(&path);
        assert_eq!(
            (contents.opened, contents.devices),
            (Opened::Whole, StoredDevices::default())
        );
    }
}
