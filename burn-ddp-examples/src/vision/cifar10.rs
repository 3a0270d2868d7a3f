//! CIFAR-10 in its own files: the binary version of <https://www.cs.toronto.edu/~kriz/cifar.html>.

use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use burn::data::dataset::{Dataset, DatasetError};
use flate2::read::GzDecoder;

use super::picture::Picture;

/// Rows and columns of a picture.
pub const SIDE: usize = 32;
/// Number of classes.
pub const CLASSES: usize = 10;
/// The archive that its authors distribute.
pub const ARCHIVE: &str = "cifar-10-binary.tar.gz";

const PIXELS: usize = 3 * SIDE * SIDE;
/// A label, then red, green and blue.
const RECORD: usize = 1 + PIXELS;

/// One half of the database in memory. Clones share it.
#[derive(Clone, Debug)]
pub struct Cifar10 {
    records: Arc<Vec<u8>>,
    len: usize,
}

impl Cifar10 {
    /// The pictures to learn from and those to be tested with, from a folder: the files `data_batch_1.bin` … and `test_batch.bin`,
    /// there or in `cifar-10-batches-bin`, else the archive, as it is.
    ///
    /// # Errors
    ///
    /// A file that is missing or not what it should be; the error names it.
    pub fn from_dir(dir: &Path) -> Result<(Self, Self)> {
        let folders = [dir.to_path_buf(), dir.join("cifar-10-batches-bin")];
        let archive = dir.join(ARCHIVE);
        let files = match folders.iter().find(|folder| folder.join("test_batch.bin").exists()) {
            Some(folder) => batches(|name| {
                let path = folder.join(name);
                std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
            })?,
            None => {
                let read = || -> Result<_> { unpack(GzDecoder::new(std::fs::File::open(&archive)?)) };
                let files = read().with_context(|| format!("cannot read {}", archive.display()))?;
                batches(|name| {
                    let found = files.iter().find(|(path, _)| path.rsplit('/').next() == Some(name));
                    Ok(found.with_context(|| format!("{} has no {name}", archive.display()))?.1.clone())
                })?
            }
        };
        let [train, test] = files;
        Ok((train, test))
    }

    /// At most `limit` of the pictures: the first, since their order is random.
    #[must_use]
    pub fn limited(mut self, limit: usize) -> Self {
        self.len = self.len.min(limit);
        self
    }

    fn add(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        ensure!(
            !bytes.is_empty() && bytes.len().is_multiple_of(RECORD),
            "{name} has {} bytes, which are no whole number of pictures with {RECORD} each",
            bytes.len()
        );
        let number = bytes.chunks_exact(RECORD).position(|record| usize::from(record[0]) >= CLASSES);
        if let Some(number) = number {
            anyhow::bail!("{name}: the class of picture {number} is {}, not one of {CLASSES}", bytes[number * RECORD]);
        }
        Arc::make_mut(&mut self.records).extend_from_slice(bytes);
        self.len = self.records.len() / RECORD;
        Ok(())
    }
}

/// Both halves, from the files that `read` yields.
fn batches(read: impl Fn(&str) -> Result<Vec<u8>>) -> Result<[Cifar10; 2]> {
    let of = |names: &[String]| -> Result<Cifar10> {
        let mut half = Cifar10 { records: Arc::default(), len: 0 };
        names.iter().try_for_each(|name| half.add(name, &read(name)?))?;
        Ok(half)
    };
    let train: Vec<String> = (1..=5).map(|number| format!("data_batch_{number}.bin")).collect();
    Ok([of(&train)?, of(&["test_batch.bin".to_string()])?])
}

/// The files of a tar archive (POSIX ustar): name and content.
fn unpack(mut tar: impl Read) -> Result<Vec<(String, Vec<u8>)>> {
    const BLOCK: usize = 512;
    let mut files = Vec::new();
    let mut header = [0; BLOCK];
    loop {
        match tar.read_exact(&mut header) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(files),
            other => other?,
        }
        let text = |field: &[u8]| {
            let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
            String::from_utf8_lossy(&field[..end]).trim().to_string()
        };
        let name = text(&header[..100]);
        if name.is_empty() {
            return Ok(files); // two empty blocks are the end
        }
        let len = usize::from_str_radix(&text(&header[124..136]), 8).with_context(|| format!("the size of {name}"))?;
        let mut content = Vec::new();
        let padded = len.next_multiple_of(BLOCK);
        let read = tar.by_ref().take(padded as u64).read_to_end(&mut content)?;
        ensure!(read == padded, "it ends in the middle of {name}");
        content.truncate(len);
        files.push((name, content));
    }
}

impl Dataset<Picture> for Cifar10 {
    fn get(&self, index: usize) -> Result<Picture, DatasetError> {
        let record = &self.records[index * RECORD..][..RECORD];
        Ok(Picture { index, pixels: record[1..].to_vec(), label: record[0].into() })
    }

    fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    /// Pictures of these classes; all pixels are the class, too.
    fn records(classes: &[u8]) -> Vec<u8> {
        classes.iter().flat_map(|&class| [class; RECORD]).collect()
    }

    fn tar(files: &[(&str, Vec<u8>)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (name, content) in files {
            let mut header = [0; 512];
            header[..name.len()].copy_from_slice(name.as_bytes());
            header[124..135].copy_from_slice(format!("{:011o}", content.len()).as_bytes());
            bytes.extend(header);
            bytes.extend(content);
            bytes.resize(bytes.len().next_multiple_of(512), 0);
        }
        bytes.extend([0; 1024]);
        bytes
    }

    fn check(dir: &Path) {
        let (train, test) = Cifar10::from_dir(dir).unwrap();
        let labels = |half: &Cifar10| (0..half.len()).map(|i| half.get(i).unwrap().label).collect::<Vec<_>>();
        assert_eq!(labels(&train), [1, 2, 2, 3, 4, 5]);
        assert_eq!(labels(&test), [9, 0]);
        assert_eq!(train.get(5).unwrap(), Picture { index: 5, pixels: vec![5; PIXELS], label: 5 });
        assert_eq!(labels(&train.limited(2)), [1, 2]);
    }

    #[test]
    fn files_and_the_archive_are_read_and_checked() {
        let dir = tempfile::tempdir().unwrap();
        let fails = |expected: &str| {
            let error = format!("{:#}", Cifar10::from_dir(dir.path()).unwrap_err());
            assert!(error.contains(expected), "{error}");
        };
        fails("cifar-10-binary.tar.gz");
        let folder = "cifar-10-batches-bin";
        let mut files = vec![
            (format!("{folder}/readme.html"), b"text".to_vec()),
            (format!("{folder}/test_batch.bin"), records(&[9, 0])),
        ];
        for number in 1..=5 {
            let classes = if number == 2 { vec![2, 2] } else { vec![number] };
            files.push((format!("{folder}/data_batch_{number}.bin"), records(&classes)));
        }
        let files: Vec<_> = files.iter().map(|(name, content)| (name.as_str(), content.clone())).collect();
        let archive = |bytes: &[u8]| {
            let mut gzip = GzEncoder::new(File::create(dir.path().join(ARCHIVE)).unwrap(), Compression::fast());
            io::Write::write_all(&mut gzip, bytes).unwrap();
            gzip.finish().unwrap();
        };
        let whole = tar(&files);
        archive(&whole[..5000]);
        fails("it ends in the middle of cifar-10-batches-bin/test_batch.bin");
        archive(&tar(&files[..3]));
        fails("has no data_batch_2.bin");
        archive(&whole);
        check(dir.path());

        fs::create_dir(dir.path().join(folder)).unwrap();
        files.iter().for_each(|(name, content)| fs::write(dir.path().join(name), content).unwrap());
        fs::remove_file(dir.path().join(ARCHIVE)).unwrap();
        check(dir.path());
        check(&dir.path().join(folder));
        let file = dir.path().join(folder).join("data_batch_3.bin");
        fs::write(&file, &records(&[3])[1..]).unwrap();
        fails("data_batch_3.bin has 3072 bytes");
        fs::write(&file, records(&[3, 10])).unwrap();
        fails("data_batch_3.bin: the class of picture 1 is 10");
        fs::remove_file(&file).unwrap();
        fails("data_batch_3.bin");
    }
}
