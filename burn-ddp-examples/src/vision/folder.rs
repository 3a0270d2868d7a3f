//! A folder of pictures, with a folder for each class.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use burn::data::dataset::{Dataset, DatasetError};
use image::ImageReader;
use image::imageops::FilterType;

use super::picture::Picture;

/// One picture in this many of a class is for the test, if there are no folders `train` and `test`.
const TESTED: usize = 5;

/// Pictures in files; each is read when it is asked for.
#[derive(Clone, Debug)]
pub struct Folder {
    /// Paths and classes.
    files: Vec<(PathBuf, usize)>,
    side: usize,
}

/// Content of a folder.
#[derive(Clone, Debug)]
pub struct Halves {
    /// Training pictures.
    pub train: Folder,
    /// Test pictures.
    pub test: Folder,
    /// Names of the classes, in alphabetical order.
    pub classes: Vec<String>,
}

impl Halves {
    /// Finds the pictures under `root`, which are resized and cropped to `side` × `side` pixels when they are read.
    ///
    /// Either `root/train/CLASS/*` and `root/test/CLASS/*` (or `root/val/…`), as torchvision has it, or `root/CLASS/*`;
    /// then every fifth picture of a class, in the order of names, is for the test. Pictures are `.png`, `.jpg` and
    /// `.jpeg`; files whose names begin with a dot are passed over.
    ///
    /// # Errors
    ///
    /// If there is any other file in these folders (the error names it), a class without pictures, a class that occurs
    /// in the test alone, or fewer than two classes.
    pub fn open(root: &Path, side: usize) -> Result<Self> {
        let train = root.join("train");
        let (train, test, classes) = if train.is_dir() {
            let tests: Vec<_> =
                ["test", "val"].map(|name| root.join(name)).into_iter().filter(|dir| dir.is_dir()).collect();
            let [test] = tests.as_slice() else {
                bail!(
                    "{} has a folder train, so it must also have exactly one of the folders test and val",
                    root.display()
                )
            };
            let classes = class_names(&train)?;
            let tested = class_names(test)?;
            if let Some(unknown) = tested.iter().find(|name| !classes.contains(name)) {
                bail!("{} has no counterpart in {}", test.join(unknown).display(), train.display());
            }
            let list = |dir: &Path, names: &[String]| -> Result<Vec<_>> {
                let of =
                    |class: usize| Ok(pictures(&dir.join(&classes[class]))?.into_iter().map(move |file| (file, class)));
                let present = (0..classes.len()).filter(|&class| names.contains(&classes[class]));
                Ok(present.map(of).collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
            };
            (list(&train, &classes)?, list(test, &tested)?, classes)
        } else {
            let classes = class_names(root)?;
            let (mut train, mut test) = (Vec::new(), Vec::new());
            for (class, name) in classes.iter().enumerate() {
                for (number, file) in pictures(&root.join(name))?.into_iter().enumerate() {
                    let half = if number % TESTED == TESTED - 1 { &mut test } else { &mut train };
                    half.push((file, class));
                }
            }
            ensure!(
                !test.is_empty(),
                "{}: every fifth picture of a class is for the test, and no class has five: add pictures, or make \
                 folders train and test",
                root.display()
            );
            (train, test, classes)
        };
        let half = |files| Folder { files, side };
        Ok(Self { train: half(train), test: half(test), classes })
    }
}

impl Folder {
    /// At most `limit` of the pictures, spread evenly over all.
    #[must_use]
    pub fn limited(mut self, limit: usize) -> Self {
        let all = self.files.len();
        if limit < all {
            self.files = (0..limit).map(|number| self.files[number * all / limit].clone()).collect();
        }
        self
    }

    fn read(&self, path: &Path) -> image::ImageResult<image::RgbImage> {
        // The content decides the format, not the name.
        let image = ImageReader::open(path)?.with_guessed_format()?.decode()?;
        let side = self.side as u32;
        Ok(image.resize_to_fill(side, side, FilterType::Triangle).into_rgb8())
    }
}

impl Dataset<Picture> for Folder {
    fn get(&self, index: usize) -> Result<Picture, DatasetError> {
        let (path, label) = &self.files[index];
        let image = self.read(path).map_err(|error| {
            DatasetError::new(io::Error::other(format!(
                "{} is not a picture that can be read: {error}",
                path.display()
            )))
        })?;
        Ok(Picture::interleaved(index, image.as_raw(), *label))
    }

    fn len(&self) -> usize {
        self.files.len()
    }
}

/// The folders in `dir`, by name.
fn class_names(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for path in entries(dir)? {
        ensure!(path.is_dir(), "{} lies where a folder for each class is expected", path.display());
        let name = path.file_name().and_then(|name| name.to_str());
        names.push(name.with_context(|| format!("{} is not named in UTF-8", path.display()))?.to_string());
    }
    ensure!(
        names.len() >= 2,
        "{} has {} folder(s): a folder for each of two classes or more is needed",
        dir.display(),
        names.len()
    );
    Ok(names)
}

/// The pictures in `dir`, by name.
fn pictures(dir: &Path) -> Result<Vec<PathBuf>> {
    let files = entries(dir)?;
    for path in &files {
        let extension = path.extension().and_then(|extension| extension.to_str()).map(str::to_ascii_lowercase);
        ensure!(
            path.is_file() && matches!(extension.as_deref(), Some("png" | "jpg" | "jpeg")),
            "{} is not a picture: .png, .jpg or .jpeg",
            path.display()
        );
    }
    ensure!(!files.is_empty(), "{} holds no pictures", dir.display());
    Ok(files)
}

/// Entries of `dir` but for hidden files, sorted by name.
fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let read = || -> io::Result<Vec<PathBuf>> { std::fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect() };
    let mut paths = read().with_context(|| format!("cannot read the folder {}", dir.display()))?;
    paths.retain(|path| !path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b".")));
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use image::{Rgb, RgbImage};

    use super::*;

    fn save(path: PathBuf, width: u32, height: u32, colour: [u8; 3]) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        RgbImage::from_pixel(width, height, Rgb(colour)).save(path).unwrap();
    }

    #[test]
    fn halves_are_folders_or_every_fifth_picture() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for number in 0..6 {
            save(root.join(format!("b/{number}.png")), 4, 4, [number, 0, 0]);
            save(root.join(format!("a/{number}.JPG")), 4, 4, [0, 0, number]);
        }
        fs::write(root.join("a/.hidden"), "").unwrap();
        let open = Halves::open(root, 4).unwrap();
        assert_eq!(open.classes, ["a", "b"]);
        assert_eq!((open.train.len(), open.test.len()), (10, 2));
        assert_eq!(open.test.files, [(root.join("a/4.JPG"), 0), (root.join("b/4.png"), 1)]);
        let fourth = open.test.get(1).unwrap();
        assert_eq!((fourth.index, fourth.label, &fourth.pixels[..16]), (1, 1, &[4; 16][..]));
        let few = open.train.limited(4);
        assert_eq!(few.files.iter().map(|(_, class)| *class).collect::<Vec<_>>(), [0, 0, 1, 1]);

        let tree = dir.path().join("tree");
        for (half, class) in [("train", "x"), ("train", "y"), ("train", "z"), ("val", "z"), ("val", "x")] {
            save(tree.join(half).join(class).join("0.png"), 2, 2, [0; 3]);
        }
        let open = Halves::open(&tree, 2).unwrap();
        assert_eq!(open.classes, ["x", "y", "z"]);
        assert_eq!(open.train.len(), 3);
        assert_eq!(open.test.files.iter().map(|(_, class)| *class).collect::<Vec<_>>(), [0, 2]);
    }

    #[test]
    fn pictures_are_resized_and_cropped_to_the_middle() {
        let dir = tempfile::tempdir().unwrap();
        let mut wide = RgbImage::from_pixel(16, 8, Rgb([0, 0, 0]));
        (2..14).for_each(|x| (0..8).for_each(|y| wide.put_pixel(x, y, Rgb([10, 20, 30]))));
        for class in ["a", "b"] {
            save(dir.path().join(format!("train/{class}/0.png")), 2, 2, [0; 3]);
            save(dir.path().join(format!("test/{class}/0.png")), 2, 2, [0; 3]);
        }
        wide.save(dir.path().join("test/a/0.png")).unwrap();
        let open = Halves::open(dir.path(), 4).unwrap();
        let picture = open.test.get(0).unwrap();
        assert_eq!(picture.pixels, [[10; 16], [20; 16], [30; 16]].concat());
        assert_eq!(open.test.get(1).unwrap().pixels, [0; 48]);
    }

    #[test]
    fn what_is_wrong_is_named_by_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let fails = |expected: &str| {
            let error = format!("{:#}", Halves::open(root, 4).unwrap_err());
            assert!(error.contains(expected), "{error}");
        };
        fails("has 0 folder(s)");
        fs::create_dir(root.join("b")).unwrap();
        save(root.join("a/0.png"), 2, 2, [0; 3]);
        fails("b holds no pictures");
        save(root.join("b/0.png"), 2, 2, [0; 3]);
        fails("no class has five");
        fs::write(root.join("b/notes.txt"), "").unwrap();
        fails("b/notes.txt is not a picture");
        fs::remove_file(root.join("b/notes.txt")).unwrap();
        fs::write(root.join("readme"), "").unwrap();
        fails("readme lies where a folder");
        fs::remove_file(root.join("readme")).unwrap();

        for class in ["a", "b"] {
            save(root.join(format!("train/{class}/0.png")), 2, 2, [0; 3]);
        }
        fails("one of test and val");
        save(root.join("test/a/0.png"), 2, 2, [0; 3]);
        save(root.join("test/c/0.png"), 2, 2, [0; 3]);
        fails("test/c has no counterpart");
        fs::rename(root.join("test/c"), root.join("test/b")).unwrap();
        fs::write(root.join("test/b/0.png"), b"not a picture").unwrap();
        let error = Halves::open(root, 4).unwrap().test.get(1).unwrap_err().to_string();
        assert!(error.contains("test/b/0.png is not a picture that can be read"), "{error}");
        let error = format!("{:#}", Halves::open(&root.join("nowhere"), 4).unwrap_err());
        assert!(error.contains("cannot read the folder"), "{error}");
    }
}
