"""Word lists and plot sentences of the demo stories: data only.

Promises nothing but constants. Slots in braces: {n} the hero's name, {he} {him} {his} the pronouns ({He},
{His} at the start of a sentence), {k} what the hero is, {in} and {t} the place, {friend} and {f} the
friend, {mood}, {past} and {now} the fact; {a_k} and {a_mood} come with their article.
"""


def spaced(text: str) -> list[str]:
    """Splits a text into words."""
    return text.split()


def bars(text: str) -> list[str]:
    """Splits a list that is written with line breaks and bars into its entries."""
    return text.strip().replace("\n", "|").split("|")


def lined(text: str) -> list[str]:
    """Splits a text into lines."""
    return text.strip().split("\n")


GIRLS = spaced("""
Abigail Ada Adele Adelina Agatha Agnes Aisha Alessandra Alice Alicia Alina Alison Alma Althea Amanda
Amara Amber Amelia Amy Ana Anais Anastasia Andromeda Angela Angelina Anika Anja Ann Anna Annabel Anne
Annette Annie Antonia Anya April Arabella Araminta Ariadne Astrid Athena Audrey Aurelia Aurora Ava
Azalea Barbara Beatrice Beatrix Belinda Bella Bernadette Beth Bettina Betty Bianca Birgit Blanche Bonnie
Brenda Brianna Bridget Brigitte Bronwen Brooke Calista Camilla Candela Carla Carlotta Carmen Carol
Caroline Carolyn Cassandra Catalina Catherine Cecilia Celeste Charlotte Cheryl Chiara Chloe Christina
Christine Cindy Claire Clara Clarissa Claudia Clementine Cleo Clover Colette Connie Constance Cora
Cordelia Cosima Cristina Cynthia Dafina Dahlia Daisy Daniela Danielle Daphne Dawn Debbie Deborah Delilah
Delphine Denise Diana Diane Donna Dora Doris Dorothea Dorothy Edith Edna Edwina Eileen Elaine Eleanor
Eleanora Elena Elettra Elif Elisa Elisabeth Elise Eliza Elizabeth Ella Ellen Ellie Elodie Elowen Elsa
Elsie Elspeth Emiko Emilia Emily Emma Enid Erica Erika Erin Ernestine Esmeralda Estelle Esther Ethel
Eudora Eugenia Eulalia Eva Evangeline Eve Evelyn Faith Fanny Fatima Faye Federica Felicia Fenella Fiona
Flavia Fleur Flora Frances Francesca Freya Frida Gabriela Gabrielle Gemma Genevieve Georgia Georgina
Geraldine Gertrude Gina Ginevra Gisela Gloria Grace Greta Griselda Guinevere Gwen Gwendolyn Hadley
Halina Hanako Hanna Hannah Harriet Hazel Heather Hedwig Heidi Helen Helena Henrietta Hermia Hilda Holly
Honora Hope Hortensia Ianthe Ida Ilaria Imogen Indira Ines Inge Ingrid Iolanthe Irene Irina Iris Isabel
Isabella Isabelle Isadora Isolde Ivy Jacinta Jacqueline Jana Jane Janet Janice Jasmine Jeanne Jemima
Jenna Jennifer Jenny Jessamine Jessica Jill Joan Joanna Jocasta Jocelyn Josephine Josie Joy Joyce Juana
Judith Julia Juliana Julie Juliet June Juniper Kalinda Karen Karin Karla Katarina Kate Katharine
Katherine Kathleen Kathy Katie Katja Kayla Keziah Kimberly Kira Kirsten Kristen Kristin Kristina Lana
Lara Larissa Laura Lauren Lavinia Layla Lea Leah Leila Lena Leocadia Leona Leonora Letitia Lila Lilian
Lilith Lily Lina Linda Linnea Lisa Liv Liza Lola Lorelei Lorraine Lotte Lottie Louisa Lucia Lucie
Lucinda Lucy Ludmila Luisa Luna Lydia Lynn Mabel Madeleine Maggie Magnolia Maja Mandy Mara Margaret
Marguerite Maria Marie Marina Mariposa Marisol Marjorie Martha Martina Mary Matilda Maud Maureen Maya
Megan Melanie Melinda Melisande Melissa Melody Mercedes Mia Michaela Michelle Mila Mildred Milena
Millicent Millie Minerva Minnie Mira Miranda Miriam Moira Molly Mona Monica Morgana Myra Myrtle Nadia
Nancy Naomi Natalia Natalie Natasha Nele Nell Nellie Nerissa Niamh Nicole Nika Nina Ninette Noelle Noemi
Nora Norma Octavia Odette Olga Olivia Olympia Ondine Ophelia Oriana Ottilie Padma Paloma Pamela Pandora
Parvati Patricia Paula Pauline Pearl Peggy Penelope Perdita Petra Philippa Philomena Phoebe Phyllis Pia
Polina Polly Pomona Poppy Portia Priya Prudence Quilla Rachel Rafaela Ramona Raquel Rebecca Regina
Renata Rhiannon Rita Roberta Rosa Rosalie Rosalind Rosamund Rose Rosemary Rosie Rowena Roxanne Ruby Ruth
Ruxandra Sabrina Sadie Saffron Sally Salome Samantha Samira Sandra Sara Sarah Saskia Scarlett Selma
Seraphina Serena Sharon Sheila Shirin Shirley Sibyl Sidonie Sigrid Silvia Simone Sofia Soledad Sonia
Sonja Sophia Sophie Sorcha Stella Stephanie Sue Susan Susanna Susanne Suzanne Svetlana Sylvia Tabitha
Tamara Tamsin Tanya Tara Tatiana Teresa Tess Tessa Thalia Theodora Theresa Thomasina Tilda Tilly Tina
Tova Trudy Ulla Ulrika Uma Una Ursula Valentina Valerie Vanessa Vashti Vera Verity Veronica Victoria
Viola Violet Violetta Virginia Vivian Vivienne Wanda Wendy Wilhelmina Willa Willow Winifred Xanthe Xenia
Yasmin Yolanda Yuki Yvette Yvonne Zara Zelda Zenobia Zinnia Zoe Zora Zuleika
""")

BOYS = spaced("""
Aaron Abel Abelard Abraham Adam Adrian Ahmed Alan Alaric Albert Aldo Alec Alejandro Alexander Alfonso
Alfred Algernon Ali Alistair Allen Alvin Amadeus Ambrose Amir Anatole Anders Andre Andreas Andrei Andrew
Andy Angus Anselm Anthony Antoine Anton Antonio Archibald Archie Arjun Armando Arnold Arthur Atticus
August Aurelio Austin Axel Balthazar Barnabas Barry Bart Bartholomew Basil Ben Benedict Benjamin Benny
Bernard Bernd Bert Bertram Bill Billy Bjarne Bjorn Bob Bobby Boris Brad Brandon Brendan Brian Bruce
Bruno Bryan Caleb Callum Calvin Carl Carlo Carlos Caspian Cassius Cecil Cedric Chandra Charles Chester
Christian Christophe Christopher Clarence Clark Claudio Claus Clement Clifford Clyde Cody Colin Connor
Conrad Constantine Cornelius Cosmo Craig Crispin Curtis Cuthbert Cyprian Cyrus Damian Dan Daniel Danny
Dante Darius Darren Dave David Dean Demetrius Dennis Derek Desmond Dexter Diego Dimitri Dirk Dmitri
Dominic Don Donald Donovan Doug Douglas Duncan Dustin Dwight Dylan Earl Ebenezer Eddie Edgar Edmund
Eduard Eduardo Edward Edwin Eldred Eli Elias Elijah Eliot Elliot Emanuel Emeka Emil Emmett Enrique Enzo
Erasmus Eric Erik Ernest Ernesto Ernie Esteban Ethan Ethelred Eugene Eustace Evan Evander Ezekiel Fabian
Felix Ferdinand Fergus Fernando Finn Finnegan Fitzroy Florian Floyd Francisco Frank Franz Fred Freddie
Frederick Friedrich Fritz Gabriel Galahad Gareth Gary Gaspard Gavin Gawain Gene Gennaro Geoff Geoffrey
Georg George Gerald Gerard Gerhard Gideon Gilbert Gino Giovanni Giuseppe Glen Godfrey Gordon Graham
Grant Greg Gregory Griffin Guido Gulliver Gunther Gus Gustavo Hamish Hannibal Hans Harold Haroun Harry
Harvey Hassan Heath Hector Heinrich Helmut Henri Henrik Henry Herbert Hercules Herman Hideo Hieronymus
Homer Horatio Howard Hubert Hugo Humphrey Hunter Ian Ibrahim Ichabod Ignatius Igor Imre Indigo Irving
Isaac Isaiah Isidore Ivan Ivo Jabari Jack Jackson Jacob Jake Jakob Jamal James Jan Janek Jared Jason
Jasper Javier Jay Jeff Jeffrey Jens Jeremiah Jeremy Jerome Jerry Jesse Jim Jimmy Joachim Joaquin Jochen
Joe Joel Johan Johannes John Johnny Jon Jonah Jonas Jonathan Jorge Jose Josef Joseph Josh Joshua Juan
Jules Julian Julius Jurgen Justin Justinian Kai Karim Karl Kasimir Keith Ken Kenji Kenneth Kevin Kofi
Konrad Kurt Kyle Lachlan Lance Lancelot Larry Lars Laszlo Laurence Lawrence Leander Lennart Leo Leon
Leonard Leonardo Leopold Leroy Lester Levi Lewis Liam Linus Lionel Lloyd Logan Lorenzo Lothar Louis Luca
Lucas Lucian Ludwig Luigi Luis Luka Lukas Luke Luther Lysander Magnus Malachi Malcolm Manfred Manuel
Marc Marcel Marco Marcus Marek Mario Marius Mark Markus Martin Marvin Mason Mateo Matt Matthew Matthias
Maurice Max Maxim Maximilian Melchior Melvin Merlin Michael Michel Miguel Mike Mikhail Miles Milo
Mitchell Mohamed Montgomery Mordecai Moritz Morris Mortimer Moses Muhammad Murray Napoleon Nate Nathan
Nathaniel Ned Nehemiah Neil Nestor Nicholas Nick Nicodemus Niels Niklas Nikolai Nils Noah Norbert Norman
Octavio Oleg Oliver Olivier Ollie Omar Orlando Orson Osbert Oscar Osvaldo Otto Owen Pablo Palmiro Pascal
Patrick Paul Paulo Pedro Percival Percy Peregrine Perry Pete Peter Phil Philip Phineas Pierre Piotr
Quentin Quincy Rafael Rainer Rajesh Ralph Ramon Randolph Raul Ray Raymond Reginald Reuben Rex Ricardo
Richard Rick Rob Robert Roberto Rocco Roderick Rodney Rodrigo Roger Roland Rolf Roman Romeo Ron Ronald
Roscoe Ross Roy Ruben Rudolf Rudy Rufus Rupert Russell Ryan Salim Salvador Samuel Sanjay Santiago Saul
Scott Sean Sebastian Septimus Sergei Sergio Seth Seymour Shane Sheldon Sigmund Silas Simeon Simon
Solomon Spencer Stan Stanislav Stanley Stefan Stephen Sterling Steve Steven Stuart Sven Sylvester Tadeo
Tariq Ted Terence Thaddeus Theo Theobald Theodore Thomas Tiberius Tim Timo Timothy Tito Tobias Toby Todd
Tom Tomas Tommy Tony Torvald Travis Trevor Tristan Troy Tyler Ulysses Umberto Uwe Vaclav Valentin
Valentino Vasco Vernon Victor Vikram Viktor Vincent Vito Vladimir Wade Waldo Wallace Walter Warren Wayne
Wendell Werner Wesley Wilbur Will Willem William Willy Winston Wolfgang Xavier Yannick Yuri Yusuf Zach
Zachary Zane Zebedee Zoltan
""")

SYLLABLES = {
    "first": spaced("""
b br c ch d dr f fl g gr h j k kr l m n p pr qu r s sh sl t th tr v w x y z
""") + [""] * 3,
    "vowel": spaced("""
a e i o u a e i o ai ea ee ie oo ou y
"""),
    "middle": spaced("""
b bb d dd l ll m mm n nn r rr s ss t v nd rl lm st k p z g
"""),
    "last": [""] * 3 + spaced("""
n r l s x m th nk lia lo ra na ka bert wick ford b d t ck g p ke ny ly my
"""),
}  # fmt: skip
# Letters about as frequent as in English; vowels with their accents; the first letters of some scripts in Unicode.
LETTERS = "eeeeaaaaooooiiiinnnnttttrrrrssssllldddhhhuuccmmppggbbyyffwwkkvvjxqz"
ACCENTS = {"a": "áàâäãåæ", "e": "éèêë", "i": "íìîï", "o": "óòôöõø", "u": "úùûü", "n": "nñ", "c": "cç", "s": "sš"}
SCRIPTS = (0x3B1, 0x410, 0x430, 0x5D0, 0x627, 0x905, 0x3041, 0x4E00, 0xAC00, 0x1F600)

# A title, and the pronoun that belongs to it, if any.
TITLES = {
    "Captain": None, "Princess": "she", "Prince": "he", "Old": None, "Little": None, "Grandma": "she",
    "Grandpa": "he", "Mister": "he", "Doctor": None, "Queen": "she", "King": "he",
}  # fmt: skip

# What a story adds to a bare name; the last entry is for titles that state an age.
GIRL_KINDS = bars("""
girl|girl|girl|young woman|little girl|clever girl|quiet girl|brave girl|old woman
""")
BOY_KINDS = bars("""
boy|boy|boy|young man|little boy|clever boy|quiet boy|brave boy|old man
""")
CREATURES = bars("""
small dragon|gray mouse|young fox|little robot|sleepy bear|tall giraffe|kind wizard|shy ghost|tiny elephant
brown rabbit|clever crow|old turtle|friendly giant|brave squirrel|round penguin|lonely lighthouse keeper
gentle troll|young knight|polite wolf|small owl|curious kitten|happy goat|wise witch|young inventor
little pirate|green frog|hungry hedgehog
""")

# head: (present, past, kind), then the objects that complete it: "can" + "talk to owls".
FACTS = {
    ("can", "could", "skill"): bars("""
talk to owls|whistle any tune|climb the tallest trees|run faster than the wind|swim like an otter
see in the dark|hear a pin drop a mile away|breathe under water|fix any clock|read very old maps
make anyone laugh|sing to bees|count the stars|knit in the dark|sleep standing up|walk on thin ice
bake perfect bread|open any lock|smell rain before it falls|speak seven languages|tie forty kinds of knots
calm angry dogs|juggle six pears|draw with both hands|float like a feather|move stones with a song
catch moonlight in a jar|remember every dream|understand the wind|find water in the desert
walk through walls|paint with smoke|grow flowers in winter|dance on a rope|sew tiny shoes
play the silver flute|hear the fish singing|make lanterns glow|whisper to horses|lift a full barrel
skip stones across the lake|guess any riddle|turn into a cat|jump over a haystack|stand on one finger
call the fog|bend spoons by looking at them|taste colors|walk backward without looking
write with a feather in each hand
"""),
    ("has", "had", "thing"): bars("""
a red kite|a brass key|a pocket full of seeds|a map of the stars|a talking spoon|a very long rope
a coat with nine pockets|a tame crow|a blue umbrella|a lantern full of starlight|a bag of warm bread
a tin whistle|a wooden leg|a silver bell|a pet snail|a jar of fireflies|a hat made of leaves
a boat as small as a bed|a book without words|a golden button|a three-legged dog|a clock with thirteen hours
a pair of green boots|a magic paintbrush|a twin sister|seven brothers|a secret door|a snoring cat
a drum made of clay|a ladder of string|a pillow full of feathers|the loudest voice in town
hair as white as milk|a mirror with a sense of humor|a bicycle with one wheel|a glass marble|a purple wagon
an old telescope|a garden on the roof|a spoon carved from bone|a mouse in one pocket|a very small piano
"""),
    ("loves", "loved", "joy"): bars("""
pancakes with honey|thunderstorms|the smell of old books|dancing in the rain|long train rides|apple trees
the color yellow|telling jokes|frogs of every kind|the sound of bells|snow more than anything|cinnamon buns
growing pumpkins|old songs|sweeping the stairs|rainbows|counting sheep|mending broken toys|the full moon
hot soup|building tall towers|feeding the ducks|spicy noodles|lemon pie|quiet mornings|puzzles
a good long walk
"""),
    ("is afraid of", "was afraid of", "fear"): bars("""
thunder|spiders|the dark|deep water|loud dogs|high places|empty houses|big waves|geese|mirrors|ghosts
getting lost|the number nine|snakes|balloons|falling leaves|trains
"""),
    ("lives", "lived", "home"): bars("""
in a lighthouse|on a houseboat|under an old bridge|in a hollow tree|above the bakery|inside a windmill
at the edge of the map|in a tent by the river|next to a volcano|in a castle made of sand|on top of a hill
behind the waterfall|in a big blue shoe|in an old train car|on a very small island|among the reeds
in a house with no doors|at the end of the road
"""),
    ("wants to", "wanted to", "wish"): bars("""
see the ocean|touch a cloud|learn to fly|find a lost city|become a baker|meet a whale|win the great race
build a ship|write a book|sail around the world|ride an elephant|plant a forest|hear the northern lights
visit the moon|make a friend|cook for a king|dig to the other side of the earth|own a bookshop
catch a falling star|learn the violin
"""),
    ("collects", "collected", "habit"): bars("""
sea glass|old keys|lost buttons|bird feathers|round stones|ticket stubs|empty bottles|bent nails|paper boats
colorful stamps|shiny spoons|dried flowers|other people's shadows|walnut shells
"""),
    ("wears", "wore", "habit"): bars("""
a crown of daisies|mismatched socks|a bright orange scarf|a yellow raincoat|a hat with a bell on it
very squeaky boots|a cloak of feathers|three watches|a necklace of acorns|silver slippers
"""),
    ("is", "was", "trade"): bars("""
a baker|the best sailor on the coast|a maker of kites|a beekeeper|a clockmaker|a goat herder
the youngest teacher in town|a painter of doors|the tallest person in the land|a mender of nets
a singer of sad songs|always hungry|never late|very good at chess|the king's gardener|always early
made of glass|as light as a leaf|as stubborn as a mule|allergic to strawberries|terribly forgetful
"""),
    ("knows", "knew", "skill"): bars("""
every song in the world|the names of all the stars|a secret path|the language of cats
how to make glue from rice|where the river begins|the oldest story of all|a thousand riddles
how to fold paper birds|the way home from anywhere
"""),
    ("always", "always", "habit"): bars("""
told the truth|sang in the bath|shared the last cookie|carried an umbrella|counted to ten|slept until noon
ate dessert first|walked barefoot|said thank you twice
"""),
}  # fmt: skip
# With the head "always" the object changes with the tense; these are the present forms, in the same order.
ALWAYS_PRESENT = bars("""
tells the truth|sings in the bath|shares the last cookie|carries an umbrella|counts to ten|sleeps until noon
eats dessert first|walks barefoot|says thank you twice
""")

# Heads that only open facts use, so that a reader's own fact finds its past tense.
OPEN_HEADS = bars("""
likes=liked|hates=hated|owns=owned|makes=made|paints=painted|sings about=sang about|hears=heard|sees=saw
sells=sold|drives=drove|rides=rode|builds=built|keeps=kept|eats only=ate only|drinks=drank|plays=played
studies=studied|fixes=fixed|finds=found|carries=carried|hides=hid|dreams of=dreamed of
believes in=believed in|works with=worked with|loves=loved|comes from=came from
is allergic to=was allergic to|is good at=was good at|is made of=was made of|is looking for=was looking for
travels with=traveled with|writes about=wrote about|bakes=baked|grows=grew|catches=caught|talks to=talked to
lost=lost|found=found|misses=missed|invented=invented|discovered=discovered|needs=needed
can fly with=could fly with|has=had|wants=wanted|can speak with=could speak with|can smell=could smell
can carry=could carry|can turn into=could turn into|wears=wore|is afraid of=was afraid of|collects=collected
lives with=lived with|lives near=lived near|wants to find=wanted to find|wants to buy=wanted to buy
knows everything about=knew everything about|takes care of=took care of|never sees=never saw
can talk to=could talk to|can see=could see|can hear=could hear|can draw=could draw|can cook=could cook
has only=had only|is friends with=was friends with|is in love with=was in love with
is the owner of=was the owner of|can not find=could not find|steals=stole|hunts=hunted
jumps over=jumped over|kicks=kicked|pushes=pushed|cleans=cleaned|washes=washed|repairs=repaired
protects=protected|visits=visited|guards=guarded|chases=chased|trains=trained|remembers=remembered
forgets=forgot|breaks=broke|throws=threw|speaks to=spoke to|lives on=lived on|lives under=lived under
lives inside=lived inside|sleeps in=slept in|sits on=sat on|reads about=read about|watches=watched|cuts=cut
sews=sewed|knits=knitted|swims with=swam with|runs from=ran from|runs after=ran after|digs for=dug for
smells like=smelled like|looks like=looked like|saves=saved|plants=planted|waits for=waited for
sings to=sang to|dances with=danced with|is proud of=was proud of|is full of=was full of
is married to=was married to|is as big as=was as big as|is tired of=was tired of
is the captain of=was the captain of|is the king of=was the king of|is the mother of=was the mother of
is the inventor of=was the inventor of|is the boss of=was the boss of|works for=worked for
teaches=taught|feeds=fed|follows=followed|draws=drew|cooks=cooked|can play=could play
""")

# Verbs for open facts under "can" and "wants to", and facts that take no object.
OPEN_VERBS = bars("""
jump over|swim across|paint|eat|carry|find|sing to|dance with|outrun|draw|cook|hide|tame|hear|lift|throw
build|ride|talk to|fly over|dream about|smell|open|fix|break|catch|climb|sell|buy|write to|play with
sleep on|turn into|make|see|juggle|feed|run from|laugh at|wake up|repair|taste|hold|understand|teach|visit
remember|guard|clean|steal|throw|melt|wash|race
""")

PLAIN_FACTS = bars("""
can fly=could fly|can swim=could swim|sings=sang|dances=danced|can not swim=could not swim
is blind=was blind|sings badly=sang badly|never sleeps=never slept|never gives up=never gave up
can read minds=could read minds|lives alone=lived alone|can do magic=could do magic|is a thief=was a thief
snores=snored|laughs a lot=laughed a lot|is a nurse=was a nurse|is a pilot=was a pilot
is a doctor=was a doctor|hates mornings=hated mornings|can not stop laughing=could not stop laughing
never smiles=never smiled|runs fast=ran fast
""")

NOUNS = spaced("""
acorn airplane anchor ant apple apron arrow axe badger bag ball banana banjo barn barrel basket bat bathtub
bead bean bear beaver bed bee beetle bell belt berry bicycle bird biscuit blanket boat bone book boot bottle
bowl box bread brick bridge broom brush bucket bug bus butterfly button cabbage cactus cake camel camera
candle cannon canoe cap car card carpet carrot castle cat cave chair cheese cherry chicken chimney clock
cloud coat coin comb comet compass computer cookie coral cow crab crayon crocodile crow crown cup curtain
deer desk diamond dinosaur dog doll dolphin donkey door dragon drum duck eagle egg elephant engine fan
feather fence fiddle fire fish flag flower flute fly forest fork fox frog garden ghost giant giraffe glove
goat gold goose grape guitar hammer harp hat hawk hen hill honey horse house ice iron island jacket jam jar
jelly jewel kangaroo kettle key king kite kitten knife knight knot ladder lake lamp lantern leaf lemon
lentil letter lion lizard lobster locket log lollipop machine magnet mango map marble mask melon milk mirror
mitten monkey moon moose mop moth mountain mouse mule mushroom needle nest net newt nut oak oar octopus
onion orange orchard otter owl ox paint palace pan panda paper parrot peach peacock pear pebble pen pencil
penguin pepper piano pickle pie pig pigeon pillow pine pipe pirate planet plate plum pocket pond pony pot
potato prince princess pumpkin puppet puppy quilt rabbit radio raft rain rat raven ribbon rice ring river
road robot rocket roof rope rose ruby sail salmon salt sandwich scarf sea seal shadow sheep shell ship shoe
shovel snail snake snow soap sock song soup spade sparrow spider spoon squirrel stamp star stone storm stove
straw string swan sword table tea teapot tent ticket tiger toad toast tomato top tower toy tractor train
tree trumpet tulip tunnel turnip turtle umbrella unicorn vase vest village violin volcano waffle wagon
walnut wand watch water whale wheel whistle willow wind window wing witch wizard wolf worm yak yarn zebra
""")

ADJECTIVES = spaced("""
ancient angry big black blue bouncy brave bright broken brown cheap clean clever cold copper crooked curly
dark dusty empty enormous fancy fast flat fluffy fresh friendly funny giant glowing golden gray green grumpy
hairy happy heavy hollow hot huge hungry invisible itchy jolly large lazy little lonely long lost loud lucky
magic metal muddy narrow new noisy old orange pink plain plastic pointy polite pretty proud purple quiet red
round rusty salty sandy scary secret shiny short shy silent silly silver sleepy slimy slow small smart soft
spotted square sticky stolen strange striped strong sweet tall tame tangled thick thin tiny tired ugly
velvet warm wet white wicked wild wise wobbly wooden yellow young
""")

OPEN_TAILS = bars("""
from the market|with two heads|in the attic|at the harbor|on Sundays|before breakfast|of every size
in the snow|at night|under the bed|from the moon|by the river|in a teacup|for breakfast|with great care
from another world|in the kitchen|in Paris|all day long|with a hammer|every morning|in the garden
""")

# What a user may add as the first event, and how the plot continues from there.
EVENTS = bars("""
{Thing} came to the {t}.|One day, {n} found {thing}.|{He} met {thing}.|One day {he} lost {thing}.
{Thing} fell from the sky.
One night, {n} dreamed of {thing}.|Suddenly there was {thing} in front of the door.|{He} went to look for {thing}.
{He} bought {thing} from the {f}.|One morning, {thing} knocked on the door.|The {f} gave {him} {thing}.
""")
JOINTS = bars("""
But that was not all.|That was only the beginning.|And then the real trouble began.|But something else was on its way.
""")

# Where the story happens, and how the plot refers to it.
PLACES = bars("""
a quiet village by the sea=village|a small town with crooked roofs=town|a green valley=valley
a busy harbor town=town|a village at the foot of a mountain=village|an old town full of bells=town
a village far from any road=village|a kingdom on a sunny island=kingdom|a village of tall pines=village
a city with a hundred bridges=city|a snowy village in the north=village
a village on a warm and windy coast=village|a kingdom of hills and streams=kingdom
a town that smelled of bread=town|a village with one long street=village|a valley between two rivers=valley
a foggy little harbor town=town|a town on an island shaped like a spoon=town
a village in the deep forest=village
""")

# The hero's friend, and how the plot refers to the friend.
FRIENDS = bars("""
an old goat=goat|a fat gray cat=cat|a noisy parrot=parrot|the baker=baker|the miller=miller
a patient donkey=donkey|the blacksmith=blacksmith|a friendly dog=dog|the mayor=mayor|a wise old owl=owl
a tired traveler=traveler|the postman=postman|a young shepherd=shepherd|the fisherman=fisherman
a shy hedgehog=hedgehog|the schoolteacher=teacher|a clumsy bear cub=cub|a talkative frog=frog
the tailor=tailor|a retired sailor=sailor
""")

MOODS = spaced("""
cheerful curious stubborn gentle thoughtful lively patient dreamy honest restless merry kind
""")

OPENINGS = lined("""
Once upon a time, in {in}, there lived {a_k} named {n}. {n} {past}.
Long ago, in {in}, there was {a_mood} {k} named {n}, who {past}.
There once was {a_k} called {n}, who {past}. {He} came from {in}, and everyone there found {him} {mood}.
In {in}, people often spoke about {a_k} named {n}. {He} was {mood}, and {he} {past}.
Far away, in {in}, lived {a_k} called {n}. The neighbors all knew that {n} {past}.
This is a story about {n}, {a_mood} {k} from {in}. What you should know first is that {he} {past}.
Once there was {a_k} whose name was {n}. {He} spent {his} days in {in}, and {he} {past}.
Not so long ago, {a_k} named {n} came to {in}. {He} was {mood} and {past}.
""")

# How the fact moves the plot, by kind of fact; the list "any" serves every kind.
TURNS = {
    "any": lined("""
But {n} {past}, and that gave {him} an idea.
Then {n} thought hard. {He} {past}, and perhaps that was the answer.
"Wait," said the {f}. "Is it not true that you are the one who {past}?" It was true.
The {f} looked at {n} and smiled, because everyone knew that {he} {past}.
"Do not forget who you are," said the {f}, and {n} remembered that {he} {past}.
"""),
    "skill": lined("""
Luckily, {n} {past}, and now was the time to show it.
Then {he} remembered what {he} did best. {n} {past}!
No one else knew what to do, but {n} {past}, so {he} took a deep breath and began.
"""),
    "thing": lined("""
Then {n} smiled, because {he} {past}. It was just what they needed.
Nobody had brought anything useful, but {n} {past}, and that was a start.
"""),
    "joy": lined("""
It made {him} think of happy things. {n} {past}, and that kept {him} going.
{n} {past}, and the thought of it made {him} brave.
"""),
    "fear": lined("""
It was not easy, because {n} {past}. {He} closed {his} eyes, counted to three, and went on anyway.
{His} knees shook. {n} {past}, but {he} did not turn back.
"""),
    "home": lined("""
"I will ask at home," {he} said. {n} {past}, and there was always help to be found there.
Because {n} {past}, {he} knew the land better than anyone.
"""),
    "wish": lined("""
"If I give up now," {he} thought, "I will never get what I dream of." {n} {past}, and dreams make people \
strong.
{n} {past}, and someone with a wish like that does not give up.
"""),
    "habit": lined("""
People had laughed about it, but {n} {past}, and today it turned out to be useful.
Everyone knew that {n} {past}. This time it helped more than anyone could have guessed.
"""),
    "trade": lined("""
It helped that {n} {past}. {He} looked at the problem from every side.
People trusted {him}, because {n} {past}.
"""),
}  # fmt: skip

ENDINGS = lined("""
And to this day, everyone in the {t} remembers that {n} {past}.
From then on, nobody ever forgot that {n} {past}.
And that is how the whole {t} learned that {n} {past}.
It was a good thing, after all, that {n} {past}.
So if you ever visit, the children will tell you that {n} {past}.
And when the stars came out, the {f} told everyone that {n} {past}.
After that day, even strangers knew that {n} {past}.
The {f} wrote it all down in a big book, and the last line said that {n} {past}.
And it all turned out well because {n} {past}.
As for the rest, nothing changed, and {n} {past}, just as before.
People still smile when they hear that {n} {past}.
That night {he} slept well, and in the morning it was still true that {n} {past}.
""")

# Each plot in nine lines: two first sentences, two troubles, two attempts, two ways out, one joy.
PLOTS = """
One morning, the bridge over the river was gone.
One morning, people woke to find the old bridge broken.
Nobody could cross to the market, and the bread was getting old.
The milk, the letters and the doctor were all on the other side.
{n} and the {f} tried to build a raft, but it sank at once.
{n} threw a plank across, but the {f} slipped and fell in with a splash.
Before evening a new bridge of rope and planks hung over the water.
By sunset the two sides were tied together again with strong rope.
The {f} danced across it first, and everyone clapped.

One winter, the snow would not stop falling.
That year, the snow came early and covered every door.
The path to the well was lost, and people were thirsty and cold.
Soon nobody in the {t} could leave the house.
{n} dug a tunnel with a soup spoon, but it fell in.
The {f} and {n} pushed and pulled, but the snow was as hard as stone.
Step by step, a path was opened from door to door.
At last they found the well under the snow, and the water was still sweet.
There was hot soup for all, and the {f} had three bowls.

One day, the big bell in the tower went silent.
One Sunday, the bell of the {t} did not ring.
Without it, nobody knew when to wake up or when to eat.
Everyone came late to everything, and people began to quarrel.
{n} climbed the tower with the {f}, but the rope was gone.
The {f} gave the bell a kick, and got only a sore foot.
Deep inside the bell, {n} found a nest with four eggs, and moved it gently to a safe place.
A little bird had tied the bell with straw, and {n} set it free.
The bell rang out again, louder than ever before.

A stranger with a sad face came to the {t}.
One evening, a stranger knocked on every door in the {t}.
He had lost his way and spoke a tongue that no one understood.
He carried an empty cage and would not say a word.
{n} offered him tea, and the {f} offered him a chair, but he only sighed.
{n} drew pictures in the dust, but the stranger shook his head.
In the end the stranger laughed, and his story came out like water from a spring.
Little by little, the stranger began to smile and to point the way to his home.
He left them a bag of silver bells as a gift.

In the middle of summer, the well ran dry.
One hot summer, there was no water left in the well.
The cows were thirsty and the gardens turned brown.
Every day the sun grew hotter, and the clouds stayed away.
{n} and the {f} dug all day and found only dust.
{n} walked to the next well, but it was dry as well.
Behind a gray rock, a thin stream of cold water began to run.
Just before dark, they found a hidden spring under the roots of an oak.
Everyone drank, and the {f} jumped right in.

On the night of the fair, all the lamps went out.
Just before the big party, every lamp in the {t} went out.
The music stopped, and the children began to cry in the dark.
People bumped into tables, and the cake fell on the floor.
{n} looked for matches, but the {f} had dropped them in the soup.
{n} held up a candle, but the wind blew it out.
Soon a soft light filled the square, brighter than a hundred lamps.
One by one, small lights began to shine in every window.
They danced until the sun came up.

One day, a letter without a name arrived.
One rainy day, the wind blew a letter through the window.
It said, "Come to the old mill before midnight."
It said, "Help me, I am locked in the tower on the hill."
{n} asked the {f} to come along, but they got lost twice.
The {f} wanted to stay home, but {n} was already at the gate.
Behind a heavy door they found a small boy and his puppy, safe and sound.
In the end it was a lonely old lady who only wanted some company.
They all had tea together, and it was the best tea in years.

A great storm came in from the west.
In the autumn, a great storm shook the {t}.
It tore off roofs and pushed boats onto the sand.
The little fishing boat was still out there, and night was coming.
{n} ran to the shore with the {f}, but the waves were too high.
The {f} shouted for help, but the wind was louder.
Wave after wave they pulled, until everyone was back on dry land.
At last the boat came home, and nobody was missing.
They sat by the fire, wet and happy.

One spring, the cherry trees did not bloom.
That spring, not one flower opened in the {t}.
The bees went away, and there would be no fruit.
Without flowers the whole year looked gray.
{n} watered every root, and the {f} sang to the branches, but nothing happened.
The {f} read a book about trees, but it was no help to {n}.
Then one bud opened, and after it a thousand more.
Under the oldest tree they found a sleeping snow fairy and woke her kindly.
The air was full of petals, and the bees came back.

The king announced a contest.
One day, a messenger announced a great contest.
Whoever could make the sad princess laugh would win a golden cup.
Whoever could cross the lake first would win a silver boat.
All the others were bigger and richer, and the {f} told {n} to go home.
{n} practiced for a week with the {f}, and everything went wrong.
When the day came, {n} was not the strongest, but {he} was the one they all cheered for.
In the last minute {n} passed everyone, and the crowd went quiet with surprise.
{He} shared the prize with the {f}, as good friends do.

One night, something ate all the pies.
Three nights in a row, something stole the pies from the kitchen.
People locked their doors and looked at each other with angry eyes.
Everybody blamed the {f}, who had crumbs on the nose.
{n} hid behind a barrel and waited, but fell asleep.
{n} and the {f} set a trap, and caught only themselves.
The thief was a baby fox that had lost its mother, and {n} brought them together again.
The thief turned out to be a raccoon, hungry and very sorry.
From then on there was always one extra pie on the window.

A ship without a crew drifted into the bay.
Early one morning, an empty ship lay on the beach.
Its sails were torn, and someone was knocking from inside.
A strange humming came from below the deck.
{n} tried the doors, while the {f} tried the windows, but all were shut.
The {f} called out three times, but there was no answer.
In the end a door opened, and out came twelve monkeys in sailor hats.
In the hold they found a chest of letters that had waited a hundred years to be read.
The whole {t} had something to talk about for years.

A little lamb was missing.
One evening, the smallest lamb did not come home.
There were wolves in the hills, and fog was rolling in.
The night was dark, and the hills were full of holes.
{n} and the {f} called and called, but only the echo answered.
{n} followed the tracks, but they ended at the river.
At last they heard a soft cry, and there was the lamb, stuck between two rocks.
Near midnight they found it asleep in a fox hole, warm and dry.
{n} carried it home, and the {f} carried the lantern.

One day, all the colors began to fade.
It began when the sky lost its blue.
First the roses went gray, and then the apples and the doors.
By noon even the {f} was as gray as ash.
{n} tried to paint the colors back, but the paint was gray too.
{n} asked the clouds, and the {f} asked the river, but nobody knew.
On the highest hill {he} found the rainbow asleep, and gently woke it up.
Behind the last house a gray ribbon was tied in a knot, and when {n} undid it, all the colors ran out.
Red and gold and green came running back into the {t}.

The old clock stopped at midnight, and so did everything else.
One night, time itself stood still.
The river hung in the air, and the birds did not move.
Nobody moved at all, except for {n} and the {f}.
{n} pushed the big hands of the clock, but they would not turn.
They shouted and clapped, but not even a leaf moved.
With one last click, the wheels began to turn again.
A grain of sand fell out of the clock, and everything began to move.
Nobody else ever knew, but the {f} did.

A giant sat down on the road and would not move.
One day, a giant fell asleep on the only road.
No carts could pass, and the shops were empty.
His snoring shook the cups from the shelves.
{n} asked nicely, and the {f} asked loudly, but it did no good.
{n} tickled his foot with a broom, but he only rolled over.
In the end the giant rubbed his eyes, said sorry and stepped aside.
The giant only wanted someone to talk to, and {n} listened until he felt better.
They became friends, and the giant carried the {f} on his shoulder.

It was the day of the great race.
Every year there was a race around the {t}, and the day had come.
The others had fast horses, but {n} had only two tired feet.
Halfway through, the road was full of mud.
{n} fell twice, and the {f} called, "Get up, get up!"
Near the mill {n} took a wrong turn, and the {f} had to whistle {him} back.
{n} came in second, but {he} had stopped to help the one who fell, and that was worth more.
At the last corner {n} flew past them all, laughing.
They got a basket of plums and ate them under a tree.

A dragon was seen near the {t}.
One evening, smoke rose from the cave on the hill.
People packed their bags, and the soldiers hid under their beds.
It burned three haystacks and sneezed at the moon.
{n} went up the hill with a bucket, and the {f} came behind, shaking.
{n} wrote it a polite letter, but the {f} was too scared to bring it.
The dragon only had a cold, and after some hot tea it felt much better.
The dragon was small and lonely, and it put its warm head in {n}'s lap.
That winter nobody needed any firewood.

The river rose higher every hour.
After ten days of rain, the river came over its banks.
Water ran under the doors and into the cellars.
The sheep stood on a tiny island of grass.
{n} and the {f} filled bags with sand, but there were not enough of them.
The {f} had a boat, but it had a hole as big as a hat.
All night long they worked, and in the morning the water went down.
They led the sheep out one by one, and not a single one was lost.
When the sun came out, the {f} hung up every wet sock in the {t}.

A small star fell from the sky.
One night, a star dropped into the pond.
It was cold and weak, and it wanted to go home.
It cried so softly that only a few could hear it.
{n} climbed on a ladder, and the {f} held it, but the sky was too far away.
{n} tried to throw it back, but it fell into the {f}'s hat.
On the third night, the star rose slowly into the sky and shone again.
The wind bent down, picked up the star and carried it home.
It still winks at them when the night is clear.

Someone had taken the mayor's golden ring.
One day, the golden ring of the queen was missing.
Everyone searched, and everyone blamed someone else.
If it was not found by sunset, there would be no feast.
{n} looked under every bed, and the {f} looked inside every pot.
{n} asked a hundred questions and got a hundred different answers.
It was in the nest of a magpie, high up in the old tower.
It had rolled under the piano, and nobody had looked there.
The feast was long, and there was cake for the magpie too.

The school had no books left.
One day, every book in the library was empty.
The words had run away, and the pages were white as snow.
Nobody could remember how the old stories went.
{n} tried to write them down again, but the {f} kept mixing up the heroes.
The {f} looked for the words in the attic and found only dust.
The words were hiding in the garden, and they came back when {n} called them by name.
One after another the stories came back, and some were even better than before.
They read aloud until the candles burned down.

A thick fog covered everything.
One morning, the fog was so thick that nobody could see a thing.
Two ships were heading straight for the rocks.
A wagon full of children was lost on the moor.
{n} lit a fire, but the {f} could not even see it from ten steps away.
{n} shouted, but the fog swallowed every word.
Slowly and carefully, everyone was led home through the white.
Just in time the ships turned, and nobody was hurt.
When the fog was gone, the {f} was found sitting in a bucket.

The old oak tree was going to be cut down.
One day, men came with saws to cut the oldest tree.
A hundred birds lived in it, and the children loved its shade.
They wanted to build a shop for shoes, right where it stood.
{n} sat down under it and would not move, and the {f} sat down too.
{n} wrote to the queen, but the answer did not come.
The men put down their saws, looked up and went home.
In the end they built the shop around the tree, and it became famous.
The birds sang all evening, and the {f} sang with them.

A baby whale was stuck on the beach.
One morning, a small whale lay on the sand.
The tide was going out, and the sun was getting hot.
Its mother was calling from far out at sea.
{n} and the {f} poured water over it, bucket after bucket.
The {f} pulled, and {n} pushed, but the whale was far too heavy.
With one last big push, the whale slid back into the waves.
At sunset the water came back, and the whale swam free.
It waved its tail, and they all waved back.

The baker fell ill on the day before the feast.
On the day before the wedding, the cook ran away.
There were two hundred guests and not one cake.
The oven was cold, and the flour was full of mice.
{n} tried a recipe from an old book, but the {f} mixed up salt and sugar.
{n} stirred and stirred, but the dough ran away down the hill.
By midnight there stood a cake as tall as a door.
In the morning the tables were full, and everything smelled of honey.
The {f} was allowed to lick all the spoons.

A door appeared in the middle of the field.
One day, a blue door stood between the trees, without a wall or a house.
Those who went in came out on another day, and very confused.
Strange music came from behind it, and a smell of oranges.
{n} knocked, but the {f} said it would be wiser to run.
{n} turned the handle to the left and to the right, but it stayed shut.
Behind it was a garden where all the lost things had gone, and {n} brought them back.
When it opened at last, there was only a small room and a very old, very happy man.
Everyone got back the thing they had missed the most.

The mountain began to rumble.
One night, the mountain shook itself like a wet dog.
Stones rolled down, and the goats ran for their lives.
The people up there were asleep and did not know of the danger.
{n} ran up the path, and the {f} ran after {him}, out of breath.
{n} rang a cow bell, but nobody heard it.
Everyone was brought to the safe side before the big stones fell.
It was only the mountain's empty stomach, and a wagon of turnips made it quiet again.
They watched the sunrise together and counted the goats.

A circus came to the {t}.
One fine day, a circus put up its striped tent.
But the clown had lost his smile, and the show could not begin.
But the elephant refused to come out of its wagon.
{n} told a joke, and the {f} fell over a chair, but it was not enough.
{n} brought hay and apples, and the {f} ate them all.
And then, all at once, the music began and the tent was full of laughter.
In the end the elephant came out with {n} sitting on its back.
They had the best seats in the front row.

There was no sleep in the {t} anymore.
For seven nights, nobody in the {t} could sleep.
A strange sound came from under the ground.
The moon was too bright, and the dogs barked at it.
{n} sang a soft song, but the {f} only asked for another.
{n} put wool in {his} ears, and the {f} hid under a pillow.
Down in the cellar a mole was learning to play the drum, and {n} asked it to play by day.
At last a soft wind came, and all the eyes fell shut.
They slept so long that breakfast became dinner.

A treasure map was found in an old shoe.
One day, the {f} found half of a treasure map.
The other half belonged to a pirate with a very bad temper.
It led across the swamp, where nobody dared to go.
{n} and the {f} dug in nine places and found nine potatoes.
{n} read it upside down, and they walked in a circle.
Under the tenth stone was a small chest, and in it a song that nobody knew.
In the end the treasure was a spring of sweet lemonade.
They shared it with the pirate, who cried with joy.

Nobody remembered the birthday of the old queen.
It was the lonely old ferryman's birthday, and everyone had forgotten it.
There was no cake, no song and no present.
It was already late, and all the shops were closed.
{n} tied a ribbon around a turnip, but the {f} ate it.
{n} picked some flowers, but the {f} sat on them.
When the candles were lit, the whole {t} came out and sang.
It became the best present of all, and it had cost nothing.
There were tears, but they were happy ones.

The wind stole all the laundry.
On washing day, a wild wind came over the hill.
Shirts and socks flew away like birds.
The mayor stood in the square in his underwear.
{n} ran after a blue sock, and the {f} got caught in a sheet.
{n} asked the wind to stop, but it only laughed.
On the far side of the hill all the clothes hung neatly in a tree.
In the end the wind grew tired and gave everything back.
The {f} kept one red sock and wore it as a hat.

The last train did not arrive.
One evening, the little train stopped in the middle of nowhere.
It carried all the presents for the winter feast.
The engine was cold, and the driver had lost his glasses.
{n} shoveled coal, and the {f} blew the whistle, but the wheels did not turn.
{n} pushed from behind, but the {f} was sitting on the brake.
With a hiss and a jump, the train rolled on into the night.
Just before midnight they saw the lights of the {t}.
All the children were awake, and nobody sent them to bed.
""".strip().split("\n\n")
